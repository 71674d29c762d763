from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duoka.forecasting.timer import LEAST, WARMUP, Timer, Timing, WindowEnd, rank_file, read, samples, warmup_steps
from duoka.supervision.status_board import StatusBoard
from duoka.trials.observer import StepLimitReached


def timer(folder: Path, steps: int, device: str) -> Timer:
    watch = Timer(steps, 0, device)
    watch.folder = folder
    return watch


@pytest.mark.parametrize(
    ("batch", "limit", "found"),
    [
        ([torch.ones(8, 3), torch.ones(8)], None, 8),
        ({"image": torch.ones(8, 3), "name": ["a"] * 8, "scale": torch.ones(())}, 8, 8),
        ([torch.ones(8, 3), torch.ones(20)], None, None),  # packed targets
        ([torch.ones(20, 8), torch.ones(20, 8)], 8, None),  # sequences first
        (["a", "b"], 2, None),
    ],
    ids=["tensors", "a dict", "other lengths", "sequences", "no tensor"],
)
def test_samples_of_a_batch(batch: Any, limit: int | None, found: int | None) -> None:
    assert samples(batch, limit) == found


@pytest.mark.parametrize(
    ("steps", "device", "window"), [(30, "cpu", 1), (30, "cuda", 4), (100, "cuda", 18), (7, "cuda", 1)]
)
def test_how_many_steps_are_timed_together(tmp_path: Path, steps: int, device: str, window: int) -> None:
    assert timer(tmp_path, steps, device).window == window


def test_a_device_is_waited_for_at_the_ends_of_windows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a fake, as there is no GPU here."""
    waits: list[int] = []
    slot = StatusBoard.create(1).slot(0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(slot.steps))
    watch = timer(tmp_path, 30, "cuda")
    watch.slot = slot
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    for step in range(1, 30):
        slot.step(step)
        watch._after(optimizer, (), {})
        watch._after(optimizer, (), {})  # another optimizer of the same step
    slot.step(30)
    with pytest.raises(StepLimitReached):
        watch._after(optimizer, (), {})
    assert waits == [2, 6, 10, 14, 18, 22, 26, 30]
    found = read(tmp_path)
    assert (found.steps, found.counted, len(found.windows)) == (30, 20, 5)


RankTimes = tuple[Sequence[WindowEnd], str, int]


def timing(folder: Path, *ranks: RankTimes, steps: int) -> Timing:
    """Write the ranks' files and read them."""
    for rank, times in enumerate(ranks):
        rank_file(folder, rank).write_text(json.dumps(times))
    (folder / "end.json").write_text(json.dumps({"steps": steps, "how": "enough"}))
    return read(folder)


def marks(ends: Sequence[float], waited: float = 0.0, samples: int | None = 8) -> list[WindowEnd]:
    """Create a mark after each step; waiting and whole time are the same in each."""
    return [
        WindowEnd(step, end, step * waited, 0.25 * step, None if samples is None else step * samples)
        for step, end in enumerate(ends, 1)
    ]


def test_the_first_steps_do_not_count(tmp_path: Path) -> None:
    ends = [100.0, 200.0, 300.0, 301.0, 302.0, 303.0, 304.0, 305.0, 315.0]  # the last one had an evaluation
    found = timing(tmp_path, (marks(ends), "sort at a.py:1", 2), steps=9)
    assert found == Timing(9, 6, (1.0, 1.0, 1.0, 1.0, 1.0, 10.0), 0.0, 0.25, "sort at a.py:1", 8, 2)
    assert found.step == 1.0
    assert found.middle == (1.0, 1.0)


def test_ranks_wait_on_average_and_the_first_has_the_clock(tmp_path: Path) -> None:
    first = (marks([float(step) for step in range(1, 10)], waited=0.5), "", 1)
    other = (marks([0.0] * 9, waited=0.1), "", 1)
    found = timing(tmp_path, first, other, steps=9)
    assert found.waited == pytest.approx(0.3)
    assert found.step == 1.0
    assert found.samples == 8


@pytest.mark.parametrize("samples", [None, 0])
def test_samples_that_are_not_known(tmp_path: Path, samples: int | None) -> None:
    times = (marks([float(step) for step in range(9)], samples=samples), "", 1)
    assert timing(tmp_path, times, steps=9).samples is None


def test_windows_of_several_steps(tmp_path: Path) -> None:
    times = ([WindowEnd(step, 3.0 * step, 0.0, 0.0, 4 * step) for step in range(2, 31, 4)], "", 1)
    found = timing(tmp_path, times, steps=30)
    assert (found.counted, found.windows, found.samples) == (20, (3.0,) * 5, 4)


def test_a_script_without_steps(tmp_path: Path) -> None:
    found = timing(tmp_path, ([], "", 1), steps=0)
    assert (found.steps, found.counted, found.windows) == (0, 0, ())


@given(st.integers(1, 10_000))
def test_how_many_steps_count(steps: int) -> None:
    counted = steps - warmup_steps(steps)
    assert warmup_steps(steps) <= WARMUP
    assert counted >= 2 * warmup_steps(steps)
    assert (counted >= LEAST) == (steps >= 7)  # the fewest that can be asked for
