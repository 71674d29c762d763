"""Saving a 500 MB model with Adam: what the loop waits for, and the whole, against torch.save to the same disk."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

import duoka
from benchmarks.runs import ROUNDS, Samples
from benchmarks.table import Absent, Row
from benchmarks.weights import LAYERS, stack


class Saver(ABC):
    """One way to save a model and its optimizer."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer

    @abstractmethod
    def begin(self) -> None:
        """What the training loop waits for."""

    def finish(self) -> None:  # noqa: B027  # most are done by then
        """Until all is written."""

    @abstractmethod
    def restore(self) -> None:
        """Load it again."""

    def clear(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class TorchSave(Saver):
    def begin(self) -> None:
        torch.save(self.state(), self.folder / "x.pt")

    def restore(self) -> None:
        state = torch.load(self.folder / "x.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Duoka(Saver):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.saved = duoka.Checkpoint(self.folder, {"model": self.model, "optimizer": self.optimizer}, keep=1)
        self.steps = count(1)

    def begin(self) -> None:
        self.saved.step_number = next(self.steps)
        self.saved.save()

    def finish(self) -> None:
        self.saved.wait()

    def restore(self) -> None:
        self.saved.restore()

    def clear(self) -> None:
        for step in self.folder.glob("step-*"):
            shutil.rmtree(step)


class AsyncDcp(Saver):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    def begin(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.future = async_save(self.state(), checkpoint_id=self.folder / "dcp")

    def finish(self) -> None:
        self.future.result()

    def restore(self) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self.state()
        load(state, checkpoint_id=self.folder / "dcp")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Accelerate(Saver):
    def __init__(self, *args: Any) -> None:
        from accelerate import Accelerator

        super().__init__(*args)
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.prepare(self.model, self.optimizer)

    def begin(self) -> None:
        self.accelerator.save_state(str(self.folder / "state"))

    def restore(self) -> None:
        self.accelerator.load_state(str(self.folder / "state"))


class Fabric(Saver):
    def __init__(self, *args: Any) -> None:
        from lightning.fabric import Fabric as Made

        super().__init__(*args)
        self.fabric = Made(accelerator="cpu", devices=1)
        self.whole = dict(zip(("model", "optimizer"), self.fabric.setup(self.model, self.optimizer), strict=True))

    def begin(self) -> None:
        self.fabric.save(self.folder / "x.ckpt", self.whole)

    def restore(self) -> None:
        self.fabric.load(self.folder / "x.ckpt", self.whole)


SAVERS = {"torch.save": TorchSave, "duoka": Duoka, "DCP async_save": AsyncDcp}
PEERS = {"Accelerate save_state": ("accelerate", Accelerate), "Fabric save": ("lightning", Fabric)}


def measure(quick: bool) -> Iterator[Row | Absent]:
    """Seconds to save and to restore; the peers are the extra `peers`."""
    layers = LAYERS // 5 if quick else LAYERS
    model = stack(layers)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    kinds = SAVERS | {name: kind for name, (package, kind) in PEERS.items() if find_spec(package)}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        savers = {at: kind(Path(name) / at.replace(" ", "-"), model, optimizer) for at, kind in kinds.items()}
        found = _in_turn(savers, 1 if quick else ROUNDS)
    missing = [name for name in PEERS if name not in kinds]
    against = found["torch.save"]
    size = f"{round(layers * 16.8)} MB and Adam"
    yield Row(f"{size}: save() stops the loop, against torch.save", found["duoka"][0], against[1], bar=0.15)
    yield Row("the whole save, synced and with digests, against torch.save", found["duoka"][1], against[1], bar=1.2)
    yield Row("restore, with digests compared, against torch.load", found["duoka"][2], against[2])
    for at in found:
        if at not in ("duoka", "torch.save"):
            yield Row(f"save() stops the loop, against {at}", found["duoka"][0], found[at][0])
            yield Row(f"the whole save, against {at}", found["duoka"][1], found[at][1])
            yield Row(f"restore, against {at}", found["duoka"][2], found[at][2])
    for at in missing:
        yield Absent(f"saving and restoring, against {at}")


def _in_turn(savers: dict[str, Saver], rounds: int) -> dict[str, tuple[Samples, Samples, Samples]]:
    """For each: until the loop goes on, until all is written, and to restore. The first round warms up."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in savers}
    for number in range(rounds + 1):
        for name, saver in savers.items():
            saver.clear()
            begin = time.perf_counter()
            saver.begin()
            stopped = time.perf_counter()
            saver.finish()
            written = time.perf_counter()
            saver.restore()
            restored = time.perf_counter()
            saver.clear()
            if number:
                found[name].append((stopped - begin, written - begin, restored - written))
    return {name: tuple(Samples(part, "s") for part in zip(*times, strict=True)) for name, times in found.items()}  # type: ignore[misc]
