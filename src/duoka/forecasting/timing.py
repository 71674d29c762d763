"""Costs of a run's steps: each rank writes a file, the command process reads them.

The first steps warm up and do not count. The result is the median of the others, so that an evaluation in a few
steps does not change it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import NamedTuple

from duoka.trials.observer import end_of, opened

WARMUP = 10  # steps that do not count; of a shorter run, a third
LEAST = 5  # counted steps that are needed
WINDOWS = 5  # number of windows on an asynchronous device, which is synchronized at the end of each


class WindowEnd(NamedTuple):
    """The end of a window of steps on one rank; values are sums since the start.

    seconds: by its clock. waited: seconds in collectives. whole: seconds of work that every rank computes whole.
    samples: taken from loaders; None if they cannot be counted.
    """

    step: int
    seconds: float
    waited: float
    whole: float
    samples: int | None


class RankTimes(NamedTuple):
    """The contents of one rank's file.

    own_samples: it counted its own rows only. costliest: the line with the most work that every rank computes whole.
    threads: CPU threads of one operation.
    """

    marks: Sequence[WindowEnd]
    own_samples: bool
    costliest: str
    threads: int


@dataclass(frozen=True)
class Timing:
    """Times of one run, in seconds per step.

    steps: number of steps made; counted: of steps after the warm-up. windows: time per step of each window, on rank
    0. waited: time in collectives, the mean over ranks. whole: time of work that every rank computes whole;
    costliest: its most expensive line. samples: per step, of all ranks; None if unknown. threads: CPU threads of one
    operation.
    """

    steps: int
    counted: int
    windows: tuple[float, ...]
    waited: float
    whole: float
    costliest: str
    samples: int | None
    threads: int

    @property
    def step(self) -> float:
        """Median time per step."""
        return median(self.windows)

    @property
    def middle(self) -> tuple[float, float]:
        """The first and third quartile of the windows' times."""
        if len(self.windows) < 2:
            return self.step, self.step
        low, _, high = quantiles(self.windows, n=4, method="inclusive")
        return low, high


def warmup_steps(steps: int) -> int:
    """Return how many of these steps do not count."""
    return min(WARMUP, steps // 3)


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"rank-{rank}.json"


def write(folder: Path, rank: int, times: RankTimes) -> None:
    """Write the measurements of one rank."""
    with opened(rank_file(folder, rank)) as file:
        file.write(json.dumps(times))


def read(folder: Path) -> Timing:
    """Read the files of a run that succeeded."""
    end, ranks = end_of(folder), list(_ranks(folder))
    steps = end.steps if end is not None else 0
    first = ranks[0]
    windows = _per_step(first, warmup_steps(steps), lambda mark: mark.seconds)
    waited = [_median(_per_step(times, warmup_steps(steps), lambda mark: mark.waited)) for times in ranks]
    return Timing(
        steps=steps,
        counted=sum(after.step - before.step for before, after in _windows(first, warmup_steps(steps))),
        windows=tuple(windows),
        waited=fmean(waited),
        whole=_median(_per_step(first, warmup_steps(steps), lambda mark: mark.whole)),
        costliest=first.costliest,
        samples=_samples(ranks, warmup_steps(steps)),
        threads=first.threads,
    )


def _ranks(folder: Path) -> Iterator[RankTimes]:
    rank = 0
    while (path := rank_file(folder, rank)).exists():
        marks, *others = json.loads(path.read_text())
        yield RankTimes([WindowEnd(*mark) for mark in marks], *others)
        rank += 1


def _windows(times: RankTimes, skipped: int) -> Iterator[tuple[WindowEnd, WindowEnd]]:
    return ((before, after) for before, after in pairwise(times.marks) if before.step >= skipped)


def _per_step(times: RankTimes, skipped: int, value: Callable[[WindowEnd], float]) -> list[float]:
    return [(value(after) - value(before)) / (after.step - before.step) for before, after in _windows(times, skipped)]


def _samples(ranks: Sequence[RankTimes], skipped: int) -> int | None:
    """Return the samples per step, or None if they cannot be counted."""
    counting = ranks if ranks[0].own_samples else ranks[:1]
    if any(mark.samples is None for times in counting for mark in times.marks):
        return None
    found = sum(_median(_per_step(times, skipped, lambda mark: float(mark.samples or 0))) for times in counting)
    return round(found) or None


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
