"""In processes of their own, as torch's hooks and loaders stay observed."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rich.progress
import torch
from rich.console import Console

import duoka
from duoka import publishing
from duoka.origins.process import this_process
from duoka.publishing import (
    Publisher,
    observe_output,
    observe_rich,
    observe_tensorboard,
    observe_tqdm,
    observe_wandb,
)
from duoka.supervision.rings import ScriptOutput
from duoka.system.messages import Lines
from tests.publishing.made import publisher

SCRIPT = """
import json, os, sys, warnings
from duoka.publishing import publish
from duoka.supervision.status_board import StatusBoard

board = StatusBoard.create(1)
publish(board, 0, shows_script=True)
assert "torch" not in sys.modules
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

seen = []
model = torch.nn.Linear(1, 1)
optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
loader = DataLoader(TensorDataset(torch.ones(10, 1)), batch_size=4)
for epoch in range(2):
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
        if os.fork() == 0:  # writes nothing
            optimizer.step()
            next(iter(loader))
            print("from a child")
            sys.stdout.flush()
            os._exit(0)
        os.wait()
    for x in loader:  # an evaluation
        pass
    other.step()
    seen.append((*board.counters(0), *board.batches(0)))

class Stream(IterableDataset):
    def __iter__(self): return iter(range(3))
    def __len__(self): return 3
for x in DataLoader(Stream(), batch_size=None):
    seen.append(board.batches(0))

before = board.counters(0)[0]
warnings.simplefilter("error", UserWarning)  # as of what the compiler cannot trace
torch.compile(lambda: optimizer.step(), backend="eager")()
seen.append(board.counters(0)[0] - before)
print("hooks", model.register_forward_hook(print).id)
print(json.dumps([seen, [line.text for _, line in board.script_output.printed(0)]]))
"""


def test_steps_also_compiled_ones_and_batches() -> None:
    done = subprocess.run([sys.executable, "-"], input=SCRIPT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen, lines = json.loads(done.stdout.splitlines()[-1])
    (steps, waited, loaded, samples, rows, seconds_of_row, *position), second, *stream, compiled = seen
    assert (steps, waited, samples, rows, seconds_of_row) == (3, 0, 24, 0, 0)
    assert loaded > 0
    assert position == [3, 3, 3, 3]
    assert (second[0], second[3]) == (6, 48)
    assert stream == [[number, 0, 3, 3] for number in (1, 2, 3)]  # nobody vouches for the length of a stream
    assert compiled == 1
    assert lines[-1] == "hooks 0"


def test_epochs_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count, expected in ((2, [(0, 2, 0), (1, 2, 0)]), (4, [(2, 4, 2), (3, 4, 2)]), (math.inf, [])):
        ours = publisher()
        seen: list[tuple[int, int, int]] = []
        monkeypatch.setattr(this_process(), "began_epoch", ours.began_epoch)
        saved = duoka.Checkpoint(tmp_path, {"weight": torch.zeros(1)})
        for _ in saved.epochs(count):  # type: ignore[arg-type]
            loop = ours.board.script_output.loops().get("epochs")
            if loop is None:
                break
            seen.append((loop["done"], loop["count"], loop["first"]))
        assert seen == expected


def printed(output: ScriptOutput) -> list[tuple[str, bool]]:
    return [(line.text, line.redrawn) for _, line in output.printed(0)]


def test_lines_are_kept_and_streams_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    ours = publisher()
    observe_output(ours)
    print("loss", 0.5)
    print("\n  \nin ", end="")
    sys.stderr.write("\r10%\r50%")
    sys.stderr.write("\r100%\nto err\n")
    print("parts")
    assert sys.stdout is out
    assert printed(ours.board.script_output) == [
        ("loss 0.5", False),
        ("10%", True),
        ("50%", True),
        ("100%", False),
        ("to err", False),
        ("in parts", False),
    ]
    out.flush()
    assert out.buffer.getvalue() == b"loss 0.5\n\n  \nin parts\n"  # type: ignore[attr-defined]

    ours.stop()
    print("by a process that the script has forked")
    assert len(printed(ours.board.script_output)) == 6


def test_beside_the_lines_of_duoka(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both observe standard error; the one that ends first does not end the other."""
    read, write = os.pipe()
    err = os.fdopen(write, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "__stderr__", err)
    ours = publisher()
    observe_output(ours)
    with Lines() as lines:
        print("one", file=sys.stderr)
        lines.say("said")
    print("two", file=sys.stderr)
    assert [text for text, _ in printed(ours.board.script_output)] == ["one", "two"]
    err.close()
    with os.fdopen(read) as file:
        assert file.read() == "one\nduoka: said\ntwo\n"


class SummaryWriter:
    """The two methods of TensorBoard's, with their arguments."""

    def __init__(self) -> None:
        self.written: list[object] = []

    def add_scalar(
        self,
        tag: str,
        scalar_value: object,
        global_step: object = None,
        walltime: object = None,
        new_style: bool = False,
    ) -> None:
        self.written.append((tag, scalar_value, global_step, walltime))

    def add_scalars(
        self, main_tag: str, tag_scalar_dict: dict[str, object], global_step: object = None, walltime: object = None
    ) -> None:
        self.written.append((main_tag, tag_scalar_dict, global_step))


class Run:
    """W&B's run, with the arguments of its `log`."""

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> str:
        if not isinstance(data, dict):
            raise ValueError("data")
        return "logged"


def test_tensorboards_calls() -> None:
    ours = publisher()
    observe_tensorboard(ours, SimpleNamespace(SummaryWriter=SummaryWriter))
    writer = SummaryWriter()
    writer.add_scalar("train/loss", torch.tensor(0.5), 3)
    writer.add_scalar("acc", scalar_value=np.float32(0.25), global_step=4, walltime=1.0)
    writer.add_scalars("lr", {"a": 1, "b": 2})
    assert writer.written == [
        ("train/loss", torch.tensor(0.5), 3, None),
        ("acc", np.float32(0.25), 4, 1.0),
        ("lr", {"a": 1, "b": 2}, None),
    ]
    found = [(value.name, value.step, value.value) for _, value in ours.board.script_output.logged(0)]
    assert found == [("train/loss", 3, 0.5), ("acc", 4, 0.25), ("lr/a", None, 1.0), ("lr/b", None, 2.0)]


def test_wandbs_calls_and_their_errors() -> None:
    ours = publisher()
    observe_wandb(ours, SimpleNamespace(Run=Run))
    assert Run().log({"loss": 1.5, "image": object(), "table": {"x": 1}}, commit=False) == "logged"
    with pytest.raises(ValueError, match="data"):
        Run().log(3)  # type: ignore[arg-type]
    assert [(value.name, value.value) for _, value in ours.board.script_output.logged(0)] == [("loss", 1.5)]


def test_a_tensor_that_other_ranks_may_have_to_read_is_left_alone() -> None:
    class Shared(torch.Tensor):
        """Reading it would wait for other ranks."""

        def item(self) -> float:
            raise AssertionError("it was read")

    ours = publisher()
    publishing._log(ours, None, {"x": torch.tensor(1.0).as_subclass(Shared)})
    assert list(ours.board.script_output.logged(0)) == []


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    monkeypatch.setattr(publishing, "EVERY", 0.0)
    return publisher()


def shown(ours: Publisher) -> list[tuple[str, float, float]]:
    return [(bar["name"], bar["done"], bar["total"]) for bar in ours.board.script_output.loops().get("bars", [])]


def test_tasks_of_rich(ours: Publisher) -> None:
    class Progress(rich.progress.Progress):
        """A class of its own, as the observed methods stay replaced."""

        advance = rich.progress.Progress.advance
        update = rich.progress.Progress.update
        stop = rich.progress.Progress.stop

    observe_rich(ours, SimpleNamespace(Progress=Progress))
    with Progress(console=Console(file=io.StringIO())) as progress:
        task, endless = progress.add_task("train:", total=10), progress.add_task("waiting", total=None)
        progress.advance(task, 4)
        progress.advance(endless, 1)
        assert shown(ours) == [("train", 4.0, 10.0)]
        assert ours.board.script_output.loops()["bars"][0]["rate"] > 0
        progress.update(task, completed=10)
        assert shown(ours) == []


def test_bars_of_tqdm(ours: Publisher) -> None:
    tqdm = pytest.importorskip("tqdm.std")

    class Bar(tqdm.tqdm):  # type: ignore[misc, name-defined]
        """A class of its own, as the observed methods stay replaced."""

        def refresh(self, *args: Any, **how: Any) -> Any:
            return super().refresh(*args, **how)

        def close(self) -> None:
            super().close()

    observe_tqdm(ours, SimpleNamespace(tqdm=Bar))
    outer = Bar(total=3, desc="epochs: ", file=io.StringIO(), mininterval=0, initial=1)
    inner = Bar(total=20, desc="batches", file=io.StringIO(), mininterval=0)
    inner.update(5)
    assert shown(ours) == [("epochs", 1, 3), ("batches", 5, 20)]
    inner.close()
    assert shown(ours) == [("epochs", 1, 3)]
    outer.update(1)
    (bar,) = ours.board.script_output.loops()["bars"]
    assert bar["rate"] > 0  # of what it did itself: one of three was done at its start
    outer.close()
    assert shown(ours) == []
