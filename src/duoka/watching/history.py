"""The history of a run, in memory that does not grow: samples become sparser as the run becomes longer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import NamedTuple

from duoka.hardware.gpu import Gpu
from duoka.supervision.rings import LoggedValue, ScriptOutput
from duoka.watching.progress import OutputReader
from duoka.watching.sample import SILENT, Parts, RankSample, RunSample, parts

SHORTEST = 0.5  # seconds between two samples, at first
MOST = 1_000  # samples of a run, and values of a name, at most twice as many
MOST_RANK_SAMPLES = 40_000  # of all ranks together
MOST_VALUES = 50_000  # of all names together, at most twice as many
_PARTS = tuple(field.name for field in fields(Parts))


class RunEvent(NamedTuple):
    """A fault or a restart. time: CLOCK_MONOTONIC. report: what was printed about it, with stacks or tracebacks."""

    time: float
    text: str
    report: str = ""


class Point(NamedTuple):
    """A value at a time (CLOCK_MONOTONIC)."""

    time: float
    value: float


class PartsPoint(NamedTuple):
    """The mean of all ranks' parts in an interval of so many seconds that ends at `time`."""

    time: float
    parts: Parts
    seconds: float


@dataclass
class Thinned:
    """Logged values of one name: every `stride`-th one, and the last. The stride doubles when there are too many."""

    points: list[Point] = field(default_factory=list)
    stride: int = 1
    count: int = 0
    last: Point | None = None

    def add(self, point: Point, most: int = MOST) -> None:
        """Add a value. most: half the number that may be kept."""
        if self.count % self.stride == 0:
            self.points.append(point)
        self.count, self.last = self.count + 1, point
        if len(self.points) >= 2 * most:
            del self.points[1::2]
            self.stride *= 2

    def all(self) -> list[Point]:
        is_kept = self.last is None or self.points[-1] == self.last
        return self.points if is_kept else [*self.points, *filter(None, [self.last])]


class History:
    """Samples of all attempts of a run, events and logged values."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.attempts: list[list[RunSample]] = []
        self.events: list[RunEvent] = []
        self.values: dict[str, Thinned] = {}
        self.memory_used: dict[str, Thinned] = {}  # bytes, by the name of a GPU
        self.utilisation: dict[str, Thinned] = {}  # percent
        self._every = SHORTEST
        self.reader = OutputReader()
        self._last: RunSample | None = None

    def begin(self) -> None:
        self.finish()
        self.attempts.append([])
        self.reader.restart()

    def add(self, sample: RunSample) -> None:
        """Add a sample of the attempt, unless the one before is too near."""
        kept = self.attempts[-1]
        if kept and sample.time - kept[-1].time < self._every:
            self._last = sample
            return
        kept.append(sample)
        self._last = None
        if sum(map(len, self.attempts)) >= 2 * min(MOST, max(100, MOST_RANK_SAMPLES // max(1, len(sample.ranks)))):
            for samples in self.attempts:  # they are sums since the start, so the others still tell every mean
                del samples[1:-1:2]
            self._every *= 2

    def finish(self) -> None:
        """End an attempt, and keep its last sample."""
        if self._last is not None and self.attempts:
            self.attempts[-1].append(self._last)
        self._last = None

    def is_due(self, time: float) -> bool:
        last = self._last or (self.attempts[-1][-1] if self.attempts and self.attempts[-1] else None)
        return last is None or time - last.time >= SHORTEST

    def read_output(self, output: ScriptOutput) -> None:
        """Add what the script has logged and printed in this attempt since the last call."""
        self.log(self.reader.read(output))

    def log(self, values: Iterable[LoggedValue]) -> None:
        for value in values:
            kept = self.values.setdefault(value.name, Thinned())
            # Fewer of each where there are many: the memory does not grow with either number.
            kept.add(Point(value.time, value.value), min(MOST, MOST_VALUES // len(self.values)))

    def look_at(self, time: float, gpus: Mapping[str, Gpu]) -> None:
        """Add the memory and utilisation of GPUs, as far as the driver reports them."""
        for name, gpu in gpus.items():
            for kept, figure in ((self.memory_used, gpu.used), (self.utilisation, gpu.utilisation)):
                if figure is not None:
                    kept.setdefault(name, Thinned()).add(Point(time, float(figure)))

    @property
    def parts(self) -> list[list[PartsPoint]]:
        """The parts of the time, for each attempt: means of all ranks."""
        return [list(_mean_parts(samples)) for samples in self.attempts]

    def step_times(self, rank: int, busy_only: bool) -> list[list[Point]]:
        """Return the seconds of a rank's step over time, for each attempt. busy_only: without waits for others."""
        return [_step_times(segment, busy_only) for segment in self._of_rank(rank)]

    def busy_time(self, rank: int) -> float:
        """Return the seconds of a step of one rank without waits for others, over all attempts."""
        ends = [(segment[0][1], segment[-1][1]) for segment in self._of_rank(rank) if segment]
        seconds = sum(last.time - first.time for first, last in ends)
        waited = sum(last.waited - first.waited for first, last in ends)
        return (seconds - waited) / max(1, sum(last.steps - first.steps for first, last in ends))

    def most_memory(self, rank: int) -> int:
        """Return the bytes that a rank had in memory at the end of an attempt, the largest number."""
        return max((samples[-1].of_rank(rank).memory for samples in self.attempts if samples), default=0)

    def memory(self, rank: int) -> list[list[Point]]:
        return [[Point(time, float(at.memory)) for time, at in segment] for segment in self._of_rank(rank)]

    def rows(self, rank: int) -> list[list[Point]]:
        """Return a rank's share of the largest batch over time, for each attempt, from its first batch on."""
        return [[Point(time, float(at.rows)) for time, at in segment if at.rows] for segment in self._of_rank(rank)]

    def _of_rank(self, rank: int) -> list[list[tuple[float, RankSample]]]:
        """Return the known samples of a rank and their times here, for each attempt."""
        pairs = ([(sample.time, sample.of_rank(rank)) for sample in samples] for samples in self.attempts)
        return [[(time, at) for time, at in segment if at.is_known] for segment in pairs]


def _mean_parts(samples: Sequence[RunSample]) -> Iterator[PartsPoint]:
    """Yield the means of intervals in which each rank has a new sample, except ranks that sent none for long."""
    before = samples[0] if samples else None
    for after in samples[1:]:
        assert before is not None
        seconds, pairs = after.time - before.time, list(zip(before.ranks, after.ranks, strict=True))
        if seconds > SILENT or (seconds > 0 and all(old.time < new.time for old, new in pairs if new.is_known)):
            of_ranks = [parts(old, new) for old, new in pairs if old.is_known and old.time < new.time]
            means = (fmean(getattr(rank, part) for rank in of_ranks) for part in _PARTS)
            yield PartsPoint(after.time, Parts(*means), seconds)
            before = after


def _step_times(segment: Sequence[tuple[float, RankSample]], busy_only: bool) -> list[Point]:
    """Average over intervals in which the rank made at least one step."""
    points: list[Point] = []
    before: RankSample | None = None
    for time, now in segment:
        if before is None:
            before = now if now.steps else None
        elif now.steps > before.steps:
            busy = now.time - before.time - (now.waited - before.waited if busy_only else 0.0)
            points.append(Point(time, max(0.0, busy) / (now.steps - before.steps)))
            before = now
    return points
