"""Small training runs with checkpoints, and faults injected into them."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import duoka
from duoka.checkpoint import sharded

CALLS = ("open", "write", "pwrite", "truncate", "fsync", "rename", "mkdir")


class Batches:
    """A loader with the state and hook that checkpoints need."""

    def __init__(self, count: int) -> None:
        self.count, self.position = count, 0
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < self.count:
            self.position += 1
            self.seen.append(self.position)
            yield torch.randn(4, 3)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}  # after the last batch it is not 0: what follows in this epoch is to come

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def things() -> dict[str, Any]:
    """Return a state of every kind."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        "average": torch.optim.swa_utils.AveragedModel(model),
        "scaler": torch.amp.GradScaler("cpu"),
        "loader": Batches(4),
        "losses": [],
        "total": torch.zeros(()),
        "best": float("inf"),
    }


class Stop(Exception):
    """Raised to interrupt a run."""


def train(directory: Path, epochs: int = 3, stop_after: int | None = None, **how: Any) -> dict[str, Any]:
    """Restore and train; returns the states. Raises Stop after so many steps of this call."""
    torch.manual_seed(0)
    run = things()
    done = 0
    with duoka.Checkpoint(directory, run, **how) as saved:
        for _ in saved.epochs(epochs):
            for batch in run["loader"]:
                loss = run["model"](batch).square().mean()
                run["optimizer"].zero_grad()
                loss.backward()
                run["optimizer"].step()
                run["average"].update_parameters(run["model"])
                run["losses"].append(loss.item())
                run["total"] += loss.detach()
                saved.values["best"] = min(saved.values["best"], loss.item())
                saved.step()
                done += 1
                if done == stop_after:
                    raise Stop
            run["scheduler"].step()
        run["best"] = saved.values["best"]
    return run


def outcome(run: dict[str, Any]) -> list[Any]:
    """Return values that are equal for equal runs."""
    weights = [it.tolist() for name in ("model", "average") for it in run[name].state_dict().values()]
    return [run["losses"], run["total"].item(), run["best"], run["scheduler"].get_last_lr(), weights]


def small(directory: Path, value: float) -> duoka.Checkpoint:
    """Create a checkpoint of a small state in which every number is `value`."""
    return duoka.Checkpoint(directory, {"model": filled(value), "note": [value]})


def filled(value: float) -> nn.Module:
    layer = nn.Linear(3, 2)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


def value_in(directory: Path) -> float:
    """Return the value of the newest intact checkpoint of `small`; fails if its numbers differ."""
    layer, note = nn.Linear(3, 2), [0.0]
    saved = duoka.Checkpoint(directory, {"model": layer, "note": note})
    assert saved.restore() is not None
    saved.close()
    values = {*layer.weight.flatten().tolist(), *layer.bias.tolist(), *note}
    assert len(values) == 1, values
    return values.pop()


@contextmanager
def fault(patch: pytest.MonkeyPatch, number: int, act: Callable[[str], None]) -> Iterator[list[str]]:
    """Count the calls that change the disk, and call `act` at the one of this number, from 0 on."""
    calls: list[str] = []
    with patch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, _counting(name, getattr(os, name), calls, number, act))
        yield calls


def _counting(name: str, original: Any, calls: list[str], number: int, act: Callable[[str], None]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == number + 1:
            act(name)
        return original(*args, **kwargs)

    return counted


def fail(name: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def die(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(act: Callable[[], None]) -> int:
    """Call a function in a forked process; returns its exit code, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Sharded models, on ranks.

WORLD = 3


def net() -> nn.Module:
    made = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 14), nn.BatchNorm1d(14), nn.Linear(14, 5))
    made.scale = nn.Parameter(torch.tensor(2.0))
    return made


def apart(run: duoka.Run) -> None:
    """Let this rank be on a machine of its own."""
    sharded.machine_name = lambda: f"machine {run.rank}"


def trained(run: duoka.Run, strategy: str = "fsdp") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run.model(model, strategy=strategy)
    for (ids,) in run.loader((torch.arange(11),), batch_size=11):
        (model(ids).square().mean() * model.scale).backward()
        optimizer.step()
    return model, optimizer


def full(path: Path, data: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def exchanges() -> list[Any]:
    """Return a list to which each exchange of rows between ranks of this process is added."""
    exchange, begun = sharded.exchange_rows, []

    def counted(*args: Any) -> Any:
        begun.append(args)
        return exchange(*args)

    sharded.exchange_rows = counted
    return begun
