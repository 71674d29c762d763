"""A run over time: speed, parts of a step, the slowest rank."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from heapq import nsmallest

from duoka.devices.gpu import Gpu
from duoka.watching.output_reader import OutputReader
from duoka.watching.parts import Parts, parts
from duoka.watching.place import Place, read_place
from duoka.watching.record import RunRecord, open_board
from duoka.watching.sample import LONG, SILENT, RankSample, RunSample, take

WINDOW = 10.0  # seconds over which speeds and parts are averaged
APART = 0.05  # of the time: ranks that wait as long as each other within this are equally fast


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank now. parts: of its time lately; None until two samples are known. cores: that it keeps busy.

    device: as planned. gpu: the state of its GPU, if it has one and the driver of this machine reports it. machine:
    as named in messages; empty if the run has only one. silent: seconds since a sample of another machine's rank
    came, or since the first look; 0.0 for ranks of this machine.
    """

    sample: RankSample
    device: str
    parts: Parts | None = None
    cores: float | None = None
    gpu: Gpu | None = None
    machine: str = ""
    silent: float = 0.0


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run at one time. Rates are averages of the last seconds; None while, or if, they are unknown.

    seconds: since the run began. slowest: the rank for which others waited most often, and the fraction of readings
    in which they did; None if no waits are measured. place: position in epochs and batches. values: the latest value
    of each name. lines: the last lines that the script printed.
    """

    record: RunRecord
    seconds: float
    steps: int
    steps_per_second: float | None
    samples_per_second: float | None
    ranks: tuple[RankState, ...]
    slowest: tuple[int, float] | None = None
    place: Place = field(default_factory=Place)
    values: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()

    @property
    def waiting(self) -> float | None:
        """The mean over ranks of the fraction of time spent waiting for others; None if it is not seen."""
        return self._mean(lambda found: found.waiting) if self.record.sees_waits else None

    @property
    def loading(self) -> float | None:
        """The largest fraction of a rank's time spent taking batches from loaders."""
        return max((one.parts.loading for one in self.ranks if one.parts), default=None)

    @property
    def queued(self) -> float | None:
        """The mean over ranks of the fraction of time spent without a core."""
        return self._mean(lambda found: found.queued)

    @property
    def rest(self) -> float | None:
        """The mean over ranks of the fraction of time spent asleep outside of waits and loaders."""
        return self._mean(lambda found: found.rest)

    def _mean(self, part: Callable[[Parts], float]) -> float | None:
        found = [part(one.parts) for one in self.ranks if one.parts is not None]
        return sum(found) / len(found) if found else None


class RunWatcher:
    """Looks at one run again and again. window: seconds over which speeds and parts are averaged."""

    def __init__(self, record: RunRecord, window: float = WINDOW) -> None:
        self._record, self._window = record, window
        self._board = open_board(record)
        self._samples: deque[RunSample] = deque()
        self._compared: RunSample | None = None
        self._since = 0.0  # time of the first sample of this attempt
        self._slowest: Counter[int] = Counter()
        self._reader = OutputReader()

    def look(self, record: RunRecord, gpus: Mapping[str, Gpu] | None = None) -> RunState:
        """Return the state of the run. record: as it is now. gpus: by the name of their device."""
        if (record.attempt, record.pids) != (self._record.attempt, self._record.pids) or self._board is None:
            self._samples.clear()
            self._compared = None
            self._slowest.clear()
            self._reader.restart()
            self._board = open_board(record)
        self._record = record
        if self._board is None:
            return self.state(gpus or {})
        self.add(take(record, self._board))
        self._reader.read(self._board.script_output)
        return replace(
            self.state(gpus or {}),
            place=read_place(self._board, time.monotonic()),
            values=dict(self._reader.latest),
            lines=tuple(self._reader.lines),
        )

    def add(self, sample: RunSample) -> None:
        """Add a sample, count which rank the others waited for, and drop samples that are older than the window."""
        self._compare(sample)
        self._samples.append(sample)
        if not all(one.is_known for one in self._samples[0].ranks):  # others came later: they are seen from then on
            pairs = zip(self._samples[0].ranks, sample.ranks, strict=True)
            first = tuple(old if old.is_known else new for old, new in pairs)
            self._samples[0] = RunSample(self._samples[0].time, first)
        while len(self._samples) > 2 and sample.time - self._samples[1].time >= self._window:
            self._samples.popleft()

    def _compare(self, sample: RunSample) -> None:
        """Count which rank the others waited for since the last comparison: the one that waited least.

        None is counted until a new sample of each rank has come.
        """
        if self._compared is None:
            self._compared, self._since = sample, sample.time
            return
        pairs = list(zip(self._compared.ranks, sample.ranks, strict=True))
        if all(old.time < new.time for old, new in pairs):
            waits = {
                new.rank: (new.waited - old.waited) / (new.time - old.time) for old, new in pairs if old.is_known
            }
            if len(waits) > 1 and sample.steps > self._compared.steps:
                least = min(waits, key=waits.__getitem__)
                self._slowest[least if max(waits.values()) - waits[least] > APART else -1] += 1
            self._compared = sample

    def state(self, gpus: Mapping[str, Gpu]) -> RunState:
        """Return the state at the last sample."""
        record = self._record
        seconds = max(0.0, time.time() - record.begun)
        if not self._samples:
            return RunState(record, seconds, 0, None, None, ())
        first, last = self._samples[0], self._samples[-1]
        span = last.time - first.time
        ranks = tuple(
            self._rank_state(old, new, last.time, gpus) for old, new in zip(first.ranks, last.ranks, strict=True)
        )
        rate = (last.steps - first.steps) / span if span > 0 and last.steps > first.steps else None
        return RunState(record, seconds, last.steps, rate, self._samples_rate(), ranks, self._most_often())

    def _rank_state(self, old: RankSample, new: RankSample, now: float, gpus: Mapping[str, Gpu]) -> RankState:
        is_elsewhere = new.received is not None or not new.is_known
        state = RankState(
            new,
            new.device,
            gpu=None if is_elsewhere else gpus.get(new.device),
            machine=self._record.machine_of(new.rank),
            silent=now - (self._since if new.received is None else new.received) if is_elsewhere else 0.0,
        )
        seconds = new.time - old.time
        if seconds <= 0 or not old.is_known:
            return state
        return replace(state, parts=parts(old, new), cores=max(0.0, new.cpu - old.cpu) / seconds)

    def _samples_rate(self) -> float | None:
        first, last = self._samples[0], self._samples[-1]
        pairs = list(zip(first.ranks, last.ranks, strict=True))
        counting = slice(None) if self._record.samples_differ else slice(1)
        taken = sum(new.samples - old.samples for old, new in pairs[counting] if old.is_known)
        return taken / (last.time - first.time) if taken > 0 and last.time > first.time else None

    def _most_often(self) -> tuple[int, float] | None:
        looks = sum(self._slowest.values())
        found = [(count, rank) for rank, count in self._slowest.items() if rank >= 0]
        if not found or not self._record.sees_waits:
            return None
        count, rank = max(found)
        return rank, count / looks


def worst(state: RunState, most: int) -> list[RankState]:
    """Return the ranks in their order; of more than so many the worst ones, the worst first.

    First come ranks without recent samples; then those that have not come to a collective in which others have
    waited long; then those that wait least, so that others wait for them, or, where waits are not seen, those that
    load and queue most.
    """
    if len(state.ranks) <= most:
        return list(state.ranks)
    some_wait = any(one.sample.since > LONG for one in state.ranks if one.sample.inside)

    def order(one: RankState) -> tuple[bool, bool, float]:
        is_missing = some_wait and not one.sample.inside
        if one.parts is None:
            return one.silent <= SILENT, not is_missing, 0.0
        small = one.parts.waiting if state.record.sees_waits else -one.parts.loading - one.parts.queued
        return one.silent <= SILENT, not is_missing, small

    return nsmallest(most, state.ranks, order)
