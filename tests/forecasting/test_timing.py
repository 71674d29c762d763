from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.forecasting.timing import LEAST, WARMUP, RankTimes, Timing, WindowEnd, read, warmup_steps, write


def timing(folder: Path, *ranks: RankTimes, steps: int) -> Timing:
    """Write the ranks' files and read them."""
    for rank, times in enumerate(ranks):
        write(folder, rank, times)
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
    found = timing(tmp_path, RankTimes(marks(ends), False, "sort at a.py:1", 2), steps=9)
    assert found == Timing(9, 6, (1.0, 1.0, 1.0, 1.0, 1.0, 10.0), 0.0, 0.25, "sort at a.py:1", 8, 2)
    assert found.step == 1.0
    assert found.middle == (1.0, 1.0)


def test_ranks_wait_on_average_and_the_first_has_the_clock(tmp_path: Path) -> None:
    first = RankTimes(marks([float(step) for step in range(1, 10)], waited=0.5), False, "", 1)
    other = RankTimes(marks([0.0] * 9, waited=0.1), False, "", 1)
    found = timing(tmp_path, first, other, steps=9)
    assert found.waited == pytest.approx(0.3)
    assert found.step == 1.0
    assert found.samples == 8


def test_rows_of_ones_own_are_added_up(tmp_path: Path) -> None:
    ends = [float(step) for step in range(9)]
    ranks = [RankTimes(marks(ends, samples=count), True, "", 1) for count in (5, 6)]
    assert timing(tmp_path, *ranks, steps=9).samples == 11


@pytest.mark.parametrize("samples", [None, 0])
def test_samples_that_are_not_known(tmp_path: Path, samples: int | None) -> None:
    times = RankTimes(marks([float(step) for step in range(9)], samples=samples), False, "", 1)
    assert timing(tmp_path, times, steps=9).samples is None


def test_windows_of_several_steps(tmp_path: Path) -> None:
    times = RankTimes([WindowEnd(step, 3.0 * step, 0.0, 0.0, 4 * step) for step in range(2, 31, 4)], False, "", 1)
    found = timing(tmp_path, times, steps=30)
    assert (found.counted, found.windows, found.samples) == (20, (3.0,) * 5, 4)


def test_a_script_without_steps(tmp_path: Path) -> None:
    found = timing(tmp_path, RankTimes([], False, "", 1), steps=0)
    assert (found.steps, found.counted, found.windows) == (0, 0, ())


@given(st.integers(1, 10_000))
def test_how_many_steps_count(steps: int) -> None:
    counted = steps - warmup_steps(steps)
    assert warmup_steps(steps) <= WARMUP
    assert counted >= 2 * warmup_steps(steps)
    assert (counted >= LEAST) == (steps >= 7)  # the fewest that can be asked for
