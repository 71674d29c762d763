"""What a run's steps have cost: written by its ranks, one file each, read by whoever compares.

The first steps, in which things are learned and allocated, do not count. Medians are taken of what is left: an
evaluation, or another look at what was learned, falls into a few steps only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import NamedTuple

from duoka.trials.accompany import end_of, opened

SETTLING = 10  # steps that do not count; of a shorter run, a third
LEAST = 5  # steps that have to be left
WINDOWS = 5  # of a device that works on its own, which waits for it at the end of each


class Mark(NamedTuple):
    """The end of a window of steps, as one rank sees it: sums since the start.

    seconds: by its clock. waited: seconds in collectives. whole: seconds in what every rank computes whole.
    samples: taken from loaders; None where they cannot be counted.
    """

    step: int
    seconds: float
    waited: float
    whole: float
    samples: int | None


class Seen(NamedTuple):
    """What one rank wrote. own_samples: it counted its own rows only. costliest: of what is computed whole.

    threads: of its processor, for one operation.
    """

    marks: Sequence[Mark]
    own_samples: bool
    costliest: str
    threads: int


@dataclass(frozen=True)
class Timing:
    """One run. All times are seconds of one step.

    steps: made. counted: of these. windows: of each window of steps, on the first rank. waited: for other ranks, the
    mean over ranks. whole: in what every rank computes whole, and costliest: most of it. samples: of all ranks.
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
        """The median."""
        return median(self.windows)

    @property
    def middle(self) -> tuple[float, float]:
        """Within this is the middle half of all windows."""
        if len(self.windows) < 2:
            return self.step, self.step
        low, _, high = quantiles(self.windows, n=4, method="inclusive")
        return low, high


def settled(steps: int) -> int:
    """How many of so many steps do not count."""
    return min(SETTLING, steps // 3)


def rank_file(folder: Path, rank: int) -> Path:
    """Where one rank writes."""
    return folder / f"rank-{rank}.json"


def write(folder: Path, rank: int, seen: Seen) -> None:
    """Write what one rank saw."""
    with opened(rank_file(folder, rank)) as file:
        file.write(json.dumps(seen))


def read(folder: Path) -> Timing:
    """What came of a run that ended well."""
    end, ranks = end_of(folder), list(_ranks(folder))
    steps = end.steps if end is not None else 0
    first = ranks[0]
    windows = _per_step(first, settled(steps), lambda mark: mark.seconds)
    waited = [_median(_per_step(seen, settled(steps), lambda mark: mark.waited)) for seen in ranks]
    return Timing(
        steps=steps,
        counted=sum(after.step - before.step for before, after in _windows(first, settled(steps))),
        windows=tuple(windows),
        waited=fmean(waited),
        whole=_median(_per_step(first, settled(steps), lambda mark: mark.whole)),
        costliest=first.costliest,
        samples=_samples(ranks, settled(steps)),
        threads=first.threads,
    )


def _ranks(folder: Path) -> Iterator[Seen]:
    rank = 0
    while (path := rank_file(folder, rank)).exists():
        marks, *others = json.loads(path.read_text())
        yield Seen([Mark(*mark) for mark in marks], *others)
        rank += 1


def _windows(seen: Seen, skipped: int) -> Iterator[tuple[Mark, Mark]]:
    return ((before, after) for before, after in pairwise(seen.marks) if before.step >= skipped)


def _per_step(seen: Seen, skipped: int, value: Callable[[Mark], float]) -> list[float]:
    return [(value(after) - value(before)) / (after.step - before.step) for before, after in _windows(seen, skipped)]


def _samples(ranks: Sequence[Seen], skipped: int) -> int | None:
    """How many samples a step takes; None where that cannot be told."""
    counting = ranks if ranks[0].own_samples else ranks[:1]
    if any(mark.samples is None for seen in counting for mark in seen.marks):
        return None
    found = sum(_median(_per_step(seen, skipped, lambda mark: float(mark.samples or 0))) for seen in counting)
    return round(found) or None


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
