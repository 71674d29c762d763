"""A run over time: its speed, the parts of a step, the slowest rank, and what stands out, in sentences."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import groupby
from statistics import fmean

from duoka.hardware.gpu import Gpu
from duoka.supervision.status_board import StatusBoard, name_ranks
from duoka.watching.progress import OutputReader, Position, read_position
from duoka.watching.record import RunRecord, open_board, take
from duoka.watching.sample import LONG, SILENT, Parts, RankSample, RunSample, parts

WINDOW = 10.0  # seconds over which speeds and parts are averaged
APART = 0.05  # of the time: ranks that wait as long as each other within this are equally fast


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank now."""

    sample: RankSample
    parts: Parts | None = None  # of its time lately; None until two samples are known
    cores: float | None = None  # that it keeps busy
    gpu: Gpu | None = None  # the state of its GPU, if it has one and the driver of this machine reports it
    machine: str = ""  # as named in messages; empty if the run has only one
    silent: float = 0.0  # seconds since a sample of another machine's rank came, or since the first look


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run at one time. Rates are averages of the last seconds; None while, or if, they are unknown."""

    record: RunRecord
    seconds: float  # since the run began
    steps: int
    steps_per_second: float | None
    samples_per_second: float | None
    ranks: tuple[RankState, ...]
    slowest: tuple[int, float] | None = None  # for which others waited most often; in what fraction of readings
    position: Position = field(default_factory=Position)  # in epochs and batches
    values: Mapping[str, float] = field(default_factory=dict)  # the latest value of each name
    lines: tuple[str, ...] = ()  # that the script printed last

    @property
    def waiting(self) -> float | None:
        """The mean over ranks of the fraction of time spent waiting for others; None if it is not seen."""
        known = [rank.parts.waiting for rank in self.ranks if rank.parts is not None]
        return fmean(known) if known and self.record.sees_waits else None

    @property
    def has_uneven_rows(self) -> bool:
        """Return whether ranks have shares of a batch that differ by more than the one row of rounding."""
        rows = [rank.sample.rows for rank in self.ranks if rank.sample.rows]
        return len(rows) > 1 and max(rows) - min(rows) > 1


class RunWatcher:
    """Looks at one run again and again. window: seconds over which speeds and parts are averaged."""

    def __init__(self, record: RunRecord, window: float = WINDOW) -> None:
        self._record, self._window = record, window
        self._board: StatusBoard | None = None
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
            self._board = open_board(record)  # each attempt has its own
        self._record = record
        if self._board is None:
            return self.state(gpus or {})
        self.add(take(record, self._board))
        self._reader.read(self._board.script_output)
        return replace(
            self.state(gpus or {}),
            position=read_position(self._board, time.monotonic()),
            values=dict(self._reader.latest),
            lines=tuple(self._reader.lines),
        )

    def add(self, sample: RunSample) -> None:
        """Add a sample, count which rank the others waited for, and drop samples that are older than the window."""
        self._compare(sample)
        self._samples.append(sample)
        if not all(rank.is_known for rank in self._samples[0].ranks):  # others came later: they are seen from then on
            pairs = zip(self._samples[0].ranks, sample.ranks, strict=True)
            first = tuple(old if old.is_known else new for old, new in pairs)
            self._samples[0] = RunSample(self._samples[0].time, first)
        # The second is looked at: the window is never shorter than it should be.
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
        counting = slice(None) if self._record.samples_differ else slice(1)  # each rank counts the whole batch
        taken = sum(new.samples - old.samples for old, new in pairs[counting] if old.is_known)
        return taken / (last.time - first.time) if taken > 0 and last.time > first.time else None

    def _most_often(self) -> tuple[int, float] | None:
        looks = sum(self._slowest.values())
        counts = [(count, rank) for rank, count in self._slowest.items() if rank >= 0]
        if not counts or not self._record.sees_waits:
            return None
        count, rank = max(counts)
        return rank, count / looks


def worst(state: RunState, most: int) -> list[RankState]:
    """Return the ranks in their order; of more than so many the worst ones, the worst first.

    First come ranks without recent samples; then those that have not come to a collective in which others have
    waited long; then those that wait least, so that others wait for them, or, where waits are not seen, those that
    load and queue most.
    """
    if len(state.ranks) <= most:
        return list(state.ranks)
    some_wait = any(rank.sample.since > LONG for rank in state.ranks if rank.sample.inside)

    def order(rank: RankState) -> tuple[bool, bool, float]:
        is_missing = some_wait and not rank.sample.inside
        if rank.parts is None:
            return rank.silent <= SILENT, not is_missing, 0.0
        small = rank.parts.waiting if state.record.sees_waits else -rank.parts.loading - rank.parts.queued
        return rank.silent <= SILENT, not is_missing, small

    return nsmallest(most, state.ranks, order)


WORTH_A_WORD = 0.2  # of the time; smaller parts are not mentioned
OFTEN = 0.6  # of readings: a rank that was the slowest in as many is the cause
NEARLY_FULL = 0.95  # of a GPU's memory

UNEVEN = (
    "the step is too short for the exchange, or the ranks do not reach it at the same time; "
    "use a larger batch, or fewer devices"
)


def findings(state: RunState) -> list[str]:
    """Return what stands out in a run, the largest part of the time first."""
    missing = list(_missing(state))
    faults = [f"fault {number}: {fault}" for number, fault in enumerate(state.record.faults, 1)]
    parts = [text for part, text in sorted(_parts(state, bool(missing)), reverse=True) if part >= WORTH_A_WORD]
    return [*_silent(state), *missing, *parts, *_memory(state), *faults]


def _parts(state: RunState, explains_wait: bool) -> Iterator[tuple[float, str]]:
    """Yield parts of the time beside computing, each with its cause. explains_wait: another finding does."""
    known = [rank.parts for rank in state.ranks if rank.parts is not None]
    if not known:
        return
    if state.waiting is not None and not explains_wait:
        yield state.waiting, f"waiting for others {state.waiting:.0%}: {_why_waiting(state)}"
    loading = max(parts.loading for parts in known)
    yield loading, f"waiting for data {loading:.0%}: the loader is the limit; raise num_workers of the DataLoader"
    queued = fmean(parts.queued for parts in known)
    yield (
        queued,
        f"waiting for a core {queued:.0%}: more threads compute on this machine than it has cores; end "
        "other programs, or start the run with fewer --threads or workers",
    )
    if not any(rank.sample.device.startswith("GPU ") for rank in state.ranks):
        rest = fmean(parts.rest for parts in known)
        yield (
            rest,
            f"asleep {rest:.0%}: the script waits for something else, as a disk, a lock or another program; "
            + _look(state, max(state.ranks, key=lambda rank: rank.parts.rest if rank.parts else 0.0)),
        )


def _why_waiting(state: RunState) -> str:
    if state.slowest is None or state.slowest[1] < OFTEN:
        return UNEVEN
    rank, often = state.slowest
    slowest = next((slowest for slowest in state.ranks if slowest.sample.rank == rank), None)
    text = f"{name_on_machines(state.record, [rank])} is the slowest in {often:.0%} of readings"
    if slowest is None or slowest.parts is None:
        return text
    if slowest.parts.queued >= WORTH_A_WORD:
        return f"{text}, for {slowest.parts.queued:.0%} of its time without a core; see who else uses this machine"
    if slowest.parts.loading >= WORTH_A_WORD:
        return f"{text}, with {slowest.parts.loading:.0%} of its time in its loader"
    if slowest.parts.rest >= WORTH_A_WORD:
        asleep = f"asleep for {slowest.parts.rest:.0%} of its time, as for a disk or in a sleep of the script"
        return f"{text}, {asleep}; {_look(state, slowest)}"
    return f"{text}: it computes more than the others, or its cores or device are slower; see what else runs there"


def name_on_machines(record: RunRecord, ranks: list[int]) -> str:
    """Return `ranks 0 and 2`; in a run on several machines `ranks 0 and 1 on machine 0 (node1), rank 3 on ...`."""
    by_machine = groupby(ranks, record.machine_of)
    return ", ".join(name_ranks(list(some)) + (f" on {machine}" if machine else "") for machine, some in by_machine)


def only_these(record: RunRecord) -> str:
    """Describe which ranks another command than that of machine 0 shows."""
    ours, first = name_on_machines(record, list(record.ranks)), name_on_machines(record, [0])
    return f"only {ours}; the command of {first} shows all"


def _silent(state: RunState) -> Iterator[str]:
    """Yield from which ranks of other machines no sample has come lately."""
    silent = [rank for rank in state.ranks if rank.silent > SILENT]
    if silent:
        names = name_on_machines(state.record, [rank.sample.rank for rank in silent])
        longest = max(rank.silent for rank in silent)
        yield f"{names}: no sample received for {longest:.0f} s; see whether its machine and its network work"


def _look(state: RunState, rank: RankState) -> str:
    if state.record.code is not None:  # the process has ended
        return "py-spy shows where"
    return f"`py-spy dump --pid {rank.sample.pid}` shows where" + (f" (on {rank.machine})" if rank.machine else "")


def _missing(state: RunState) -> Iterator[str]:
    """Yield which ranks have waited long in a collective, and for whom."""
    known = [sample.sample for sample in state.ranks if sample.silent <= SILENT]
    waiting = [sample for sample in known if sample.inside and sample.since > LONG]
    absent = [sample.rank for sample in known if not sample.inside]
    if waiting:
        longest = max(waiting, key=lambda sample: sample.since)
        names = name_on_machines(state.record, [sample.rank for sample in waiting])
        verb = "has" if len(waiting) == 1 else "have"
        whom = f"; {name_on_machines(state.record, absent)} did not call it yet" if absent else ""
        yield f"{names} {verb} been in {longest.inside} for {longest.since:.0f} s{whom}"


def _memory(state: RunState) -> Iterator[str]:
    for rank in state.ranks:
        if rank.gpu is not None and rank.gpu.memory and (rank.gpu.used or 0) > NEARLY_FULL * rank.gpu.memory:
            yield f"the memory of {rank.sample.device} is nearly full: use a smaller batch, or --strategy fsdp"
