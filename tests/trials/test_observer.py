from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from duoka.supervision.status_board import StatusBoard
from duoka.trials.observer import TrialEnd, TrialObserver, end_of, watch_loaders
from tests.view.processes import GONE, Raised, forked


class Counting(TrialObserver):
    """Records steps that the test reports."""

    def install(self) -> None:
        pass

    def close(self) -> None:
        with (self.folder / "closed").open("a") as file:
            file.write("x")

    def step(self) -> None:
        self.steps += 1
        if self.steps >= 3:
            self.enough()


def lived(folder: Path, script: Callable[[Counting], object], rank: int = 0) -> object:
    """Run a script under an observer for three steps, in a forked process; returns its outcome."""
    counting = Counting(3, 7)
    counting.folder = folder

    def life(_: int) -> str:
        with counting.around(StatusBoard.create(rank + 1).slot(rank)):
            script(counting)
        return "went on"

    return forked(1, life)[0]


def exits(code: object) -> Callable[[Counting], None]:
    def script(watch: Counting) -> None:
        watch.step()
        sys.exit(code)  # type: ignore[arg-type]

    return script


def raises(watch: Counting) -> None:
    watch.step()
    raise ValueError("wrong")


def goes_on_whatever_happens(watch: Counting) -> None:
    while True:
        with suppress(BaseException):
            watch.step()


def forbids_all_but_exceptions(watch: Counting) -> None:
    while True:
        try:
            watch.step()
        except Exception:
            raise AssertionError("an exception like others") from None


@pytest.mark.parametrize(
    ("script", "end", "came_to"),
    [
        (lambda watch: watch.step(), TrialEnd(1, "ended"), "went on"),
        (lambda watch: None, TrialEnd(0, "ended"), "went on"),
        (exits(None), TrialEnd(1, "ended"), "went on"),
        (exits(0), TrialEnd(1, "ended"), "went on"),
        (exits("a message"), TrialEnd(1, "failed"), Raised("SystemExit", "a message")),
        (raises, TrialEnd(1, "failed"), Raised("ValueError", "wrong")),
        (forbids_all_but_exceptions, TrialEnd(3, "enough"), "went on"),
        (goes_on_whatever_happens, TrialEnd(3, "enough"), GONE),
    ],
    ids=["ends", "does nothing", "exits", "exits with 0", "exits badly", "raises", "enough", "goes on"],
)
def test_how_a_script_ends(
    tmp_path: Path, script: Callable[[Counting], object], end: TrialEnd, came_to: object
) -> None:
    assert lived(tmp_path, script) == came_to
    assert end_of(tmp_path) == end
    assert (tmp_path / "closed").read_text() == "x"


def test_the_first_rank_tells_the_end(tmp_path: Path) -> None:
    lived(tmp_path, lambda watch: watch.step(), rank=1)
    assert end_of(tmp_path) is None
    assert (tmp_path / "closed").exists()


def test_all_begin_with_the_seed(tmp_path: Path) -> None:
    def script(watch: Counting) -> None:
        drawn = torch.rand(3)
        assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))

    assert lived(tmp_path, script) == "went on"


def test_batches_are_seen_on_their_way() -> None:
    def life(_: int) -> Any:
        seen: list[Any] = []
        watch_loaders(lambda loader, batch: seen.append((loader.batch_size, len(batch[0]))))
        loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=3)
        first = iter(loader)
        next(first)
        batches = list(loader)
        return seen, len(batches), len(first), hasattr(first, "no_such_thing"), first._num_yielded

    seen, batches, length, strange, yielded = forked(1, life)[0]
    assert seen == [(3, 3)] * 3 + [(3, 1)]
    assert (batches, length, strange, yielded) == (3, 3, False, 1)
