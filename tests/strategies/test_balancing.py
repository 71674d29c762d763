"""Shares by speed, of simulated ranks whose steps take a fixed time and one for each row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise, repeat
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duoka.collectives.base import OneRank
from duoka.strategies import balancing
from duoka.strategies.balancing import Balance, Point, balanced
from duoka.view.view import View

RANKS = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.1, 100.0)), min_size=2, max_size=8)


def times(ranks: Sequence[tuple[float, float]], shares: Sequence[float]) -> list[float]:
    return [fixed + growing * share for (fixed, growing), share in zip(ranks, shares, strict=True)]


@given(RANKS)
def test_shares_come_to_take_as_long_everywhere(ranks: list[tuple[float, float]]) -> None:
    """Or a rank has next to none, because its fixed time alone is longer than that of a step."""
    shares = [1 / len(ranks)] * len(ranks)
    points: list[Point] = []
    for _ in range(30):
        points = [*points[-2:], (shares, times(ranks, shares))]
        shares, _ = balanced(points)
        shares = [max(share, 1e-3) for share in shares]
        shares = [share / sum(shares) for share in shares]
    took = times(ranks, shares)
    assert max(took) <= 1.02 * max(times(ranks, [1 / len(ranks)] * len(ranks)))
    busy = [time for time, share in zip(took, shares, strict=True) if share > 0.01]
    assert max(busy) <= 1.1 * min(busy) or min(fixed for fixed, _ in ranks) * 2 > min(busy)


def test_shares_without_fixed_times_are_right_at_once() -> None:
    ranks = [(0.0, 1.0), (0.0, 2.0), (0.0, 4.0)]
    shares, time = balanced([([1 / 3] * 3, times(ranks, [1 / 3] * 3))])
    assert shares == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert time == pytest.approx(4 / 7)


class Ranks(OneRank):
    """Rank 0 of several, the others of which are told."""

    def __init__(self, costs: list[tuple[float, float]]) -> None:
        super().__init__()
        self.costs, self.world_size, self.view = costs, len(costs), None
        self.most = [math.inf] * len(costs)  # shares that their memory holds
        self.noise: Iterator[float] = repeat(1.0)  # factors of the times

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.view is not None
        partition = self.view.partition(self.view.largest)
        seconds = times(self.costs, [size / partition.n for size in partition.sizes])
        seconds = [time * next(self.noise) for time in seconds]
        return torch.tensor(list(zip(seconds, self.most, strict=True)))


def run_steps(ranks: Ranks, changes: dict[int, Any], steps: int = 400) -> list[str]:
    """Make steps of an optimizer. changes: step -> new costs. Returns what was said."""
    said: list[str] = []
    view: Any = View(ranks, lambda leaf: None)
    ranks.view = view
    view.partition(64)
    balance = Balance(view, ranks, torch.device("cpu"), said.append)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    try:
        for step in range(steps):
            ranks.costs = changes.get(step, ranks.costs)
            view.partition(64)
            optimizer.step()
    finally:
        balance.handle.remove()
    return said


def test_equal_ranks_keep_even_shares() -> None:
    assert run_steps(Ranks([(0.1, 1.0), (0.11, 1.02)]), {}) == []


@given(st.lists(st.floats(0.98, 1.02), min_size=40, max_size=40), st.integers(2, 8))
def test_noise_does_not_move_the_shares_of_equal_ranks(noise: list[float], size: int) -> None:
    ranks = Ranks([(0.1, 1.0)] * size)
    ranks.noise = cycle(noise)
    assert run_steps(ranks, {}) == []


@given(st.lists(st.floats(0.1, 10.0), min_size=40, max_size=40), RANKS)
def test_no_two_changes_are_within_a_window(noise: list[float], costs: list[tuple[float, float]]) -> None:
    ranks = Ranks(costs)
    ranks.noise = cycle(noise)
    steps = [int(line.split()[-2]) for line in run_steps(ranks, {})]
    assert all(later - earlier >= balancing.WINDOWS[-1] for earlier, later in pairwise(steps))


def test_a_slow_rank_gets_fewer_rows_once() -> None:
    said = run_steps(Ranks([(0.0, 1.0), (0.0, 3.0)]), {})
    assert said == ["rows 48 + 16 of 64 (3 : 1, measured after 43 steps)"]


def test_no_rank_gets_more_than_its_memory_holds() -> None:
    ranks = Ranks([(0.0, 1.0), (0.0, 3.0), (0.0, 3.0)])
    ranks.most = [0.4, math.inf, math.inf]
    assert run_steps(ranks, {})[0].startswith("rows 26 + 19 + 19 of 64")
    ranks.most[0] = 0.1  # has more already
    assert run_steps(ranks, {}) == []


def test_a_fixed_time_is_found_by_the_second_measurement() -> None:
    ranks = Ranks([(0.5, 1.0), (0.5, 3.0)])
    said = run_steps(ranks, {})
    assert [line.split()[-2] for line in said] == ["43", "96"]
    partition = ranks.view.partition(64)  # type: ignore[attr-defined]
    took = times(ranks.costs, [size / 64 for size in partition.sizes])
    assert max(took) < 1.05 * min(took)


def test_shares_follow_a_job_that_comes_and_goes() -> None:
    even, slowed = [(0.0, 1.0), (0.0, 1.0)], [(0.0, 1.0), (0.0, 2.0)]
    said = run_steps(Ranks(even), {100: slowed, 300: even}, 500)
    assert [line.partition(" of")[0] for line in said] == ["rows 43 + 21", "rows 32 + 32"]


def test_one_slow_window_moves_nothing() -> None:
    even, slowed = [(0.0, 1.0), (0.0, 1.0)], [(0.0, 1.0), (0.0, 2.0)]
    first = balancing.MEASURED
    assert run_steps(Ranks(even), {first: slowed, first + 10: even}) == []
