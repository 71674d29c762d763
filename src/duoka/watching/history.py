"""The history of a run, in memory that does not grow: samples become sparser as the run becomes longer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from duoka.supervision.told import LoggedValue, Told
from duoka.watching.hearing import Hearer
from duoka.watching.parts import Parts, parts
from duoka.watching.sample import RunSample

SHORTEST = 0.5  # seconds between two samples, at first
MOST = 1_000  # samples of a run, and values of a name, at most twice as many
MOST_RANK_SAMPLES = 40_000  # of all ranks together


class Event(NamedTuple):
    """A fault or a restart. time: CLOCK_MONOTONIC. report: what was printed about it, with stacks or tracebacks."""

    time: float
    text: str
    report: str = ""


class Point(NamedTuple):
    """A value at a time (CLOCK_MONOTONIC)."""

    time: float
    value: float


class PartsPoint(NamedTuple):
    """The mean of all ranks' parts in an interval that ends at `time`."""

    time: float
    parts: Parts


@dataclass
class Thinned:
    """Values of one name: every `stride`-th one, and the last."""

    points: list[Point] = field(default_factory=list)
    stride: int = 1
    count: int = 0
    last: Point | None = None

    def add(self, point: Point) -> None:
        """Add a value."""
        if self.count % self.stride == 0:
            self.points.append(point)
        self.count, self.last = self.count + 1, point
        if len(self.points) >= 2 * MOST:
            del self.points[1::2]
            self.stride *= 2

    def all(self) -> list[Point]:
        """Return the points that are kept."""
        is_kept = self.last is None or self.points[-1] == self.last
        return self.points if is_kept else [*self.points, *filter(None, [self.last])]


class History:
    """Samples of all attempts of a run, events and logged values."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.attempts: list[list[RunSample]] = []
        self.events: list[Event] = []
        self.values: dict[str, Thinned] = {}
        self._every = SHORTEST
        self.hearer = Hearer()
        self._last: RunSample | None = None

    def begin(self) -> None:
        """Begin an attempt."""
        self.finish()
        self.attempts.append([])
        self.hearer.restart()

    def add(self, sample: RunSample) -> None:
        """Add a sample of the attempt, unless the one before is too near."""
        kept = self.attempts[-1]
        if kept and sample.time - kept[-1].time < self._every:
            self._last = sample
            return
        kept.append(sample)
        self._last = None
        if sum(map(len, self.attempts)) >= 2 * min(MOST, max(100, MOST_RANK_SAMPLES // max(1, len(sample.ranks)))):
            for samples in self.attempts:
                del samples[1:-1:2]
            self._every *= 2

    def finish(self) -> None:
        """Keep the last sample of an attempt that has ended."""
        if self._last is not None and self.attempts:
            self.attempts[-1].append(self._last)
        self._last = None

    def is_due(self, time: float) -> bool:
        """Return whether it is time for another sample."""
        last = self._last or (self.attempts[-1][-1] if self.attempts and self.attempts[-1] else None)
        return last is None or time - last.time >= SHORTEST

    def hear(self, told: Told) -> None:
        """Add what the script has logged and printed in this attempt since the last call."""
        self.log(self.hearer.hear(told))

    def log(self, values: Iterable[LoggedValue]) -> None:
        """Add values that the script has logged."""
        for value in values:
            self.values.setdefault(value.name, Thinned()).add(Point(value.time, value.value))

    def mean_parts(self) -> list[list[PartsPoint]]:
        """Return the mean parts of the time over all ranks, for each attempt."""
        return [[_mean_parts(before, after) for before, after in _pairs(samples)] for samples in self.attempts]

    def step_times(self, rank: int, own: bool) -> list[list[Point]]:
        """Return the seconds of a step of one rank over time, for each attempt. own: without waits for others."""
        return [_step_times(samples, rank, own) for samples in self.attempts]

    def memory(self, rank: int) -> list[list[Point]]:
        """Return the bytes that a rank has in memory over time, for each attempt."""
        return [
            [Point(sample.time, float(sample.of(rank).memory)) for sample in samples] for samples in self.attempts
        ]


def _pairs(samples: Sequence[RunSample]) -> Iterable[tuple[RunSample, RunSample]]:
    return ((before, after) for before, after in pairwise(samples) if after.time > before.time)


def _mean_parts(before: RunSample, after: RunSample) -> PartsPoint:
    seconds = after.time - before.time
    found = [parts(old, new, seconds) for old, new in zip(before.ranks, after.ranks, strict=True)]
    means = (fmean(values) for values in zip(*(_fields(one) for one in found), strict=True))
    return PartsPoint(after.time, Parts(*means))


def _fields(one: Parts) -> tuple[float, ...]:
    return one.waiting, one.loading, one.computing, one.queued, one.rest


def _step_times(samples: Sequence[RunSample], rank: int, own: bool) -> list[Point]:
    """Average over intervals in which the rank made at least one step."""
    points: list[Point] = []
    before: tuple[float, int, float] | None = None
    for sample in samples:
        one = sample.of(rank)
        now = sample.time, one.steps, one.waited
        if before is None:
            before = now if one.steps else None
        elif now[1] > before[1]:
            busy = now[0] - before[0] - (now[2] - before[2] if own else 0.0)
            points.append(Point(now[0], max(0.0, busy) / (now[1] - before[1])))
            before = now
    return points
