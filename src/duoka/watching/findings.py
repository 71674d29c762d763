"""Explain measured times, and say what to do, in sentences shared by `duoka watch`, reports and `duoka forecast`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from duoka.supervision.status_board import name_ranks
from duoka.watching.record import RunRecord
from duoka.watching.sample import LONG, SILENT
from duoka.watching.watcher import RankState, RunState

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
    parts = [text for part, text in sorted(_parts(state, bool(missing)), reverse=True) if part >= WORTH_A_WORD]
    return [*_silent(state), *missing, *parts, *_memory(state), *_faults(state)]


def _parts(state: RunState, explains_wait: bool) -> Iterator[tuple[float, str]]:
    """Yield parts of the time beside computing, each with its cause. explains_wait: another finding does."""
    if state.waiting is not None and not explains_wait:
        yield state.waiting, f"waiting for others {state.waiting:.0%}: {_why_waiting(state)}"
    if state.loading is not None:
        yield (
            state.loading,
            f"waiting for data {state.loading:.0%}: the loader is the limit; raise num_workers of the DataLoader",
        )
    if state.queued is not None:
        yield (
            state.queued,
            f"waiting for a core {state.queued:.0%}: more threads compute on this machine than it has cores; end "
            "other programs, or start the run with fewer --threads or workers",
        )
    if state.rest is not None and not any(one.device.startswith("GPU ") for one in state.ranks):
        yield (
            state.rest,
            f"asleep {state.rest:.0%}: the script waits for something else, as a disk, a lock or another program; "
            + _look(state, max(state.ranks, key=lambda one: one.parts.rest if one.parts else 0.0)),
        )


def _why_waiting(state: RunState) -> str:
    if state.slowest is None or state.slowest[1] < OFTEN:
        return UNEVEN
    rank, often = state.slowest
    one = next((one for one in state.ranks if one.sample.rank == rank), None)
    text = f"{name_places(state.record, [rank])} is the slowest in {often:.0%} of readings"
    if one is None or one.parts is None:
        return text
    if one.parts.queued >= WORTH_A_WORD:
        return f"{text}, for {one.parts.queued:.0%} of its time without a core; see who else uses this machine"
    if one.parts.loading >= WORTH_A_WORD:
        return f"{text}, with {one.parts.loading:.0%} of its time in its loader"
    if one.parts.rest >= WORTH_A_WORD:
        asleep = f"asleep for {one.parts.rest:.0%} of its time, as for a disk or in a sleep of the script"
        return f"{text}, {asleep}; {_look(state, one)}"
    return f"{text}: it computes more than the others, or its cores or device are slower; see what else runs there"


def name_places(record: RunRecord, ranks: list[int]) -> str:
    """Return `ranks 0 and 2`; in a run on several machines `ranks 0 and 1 on machine 0 (node1), rank 3 on ...`."""
    by_machine = groupby(ranks, record.machine_of)
    return ", ".join(name_ranks(list(some)) + (f" on {machine}" if machine else "") for machine, some in by_machine)


def only_these(record: RunRecord) -> str:
    """Describe which ranks another command than that of machine 0 shows."""
    return f"only {name_places(record, list(record.ranks))}; the command of {name_places(record, [0])} shows all"


def _silent(state: RunState) -> Iterator[str]:
    """Yield from which ranks of other machines no sample has come lately."""
    silent = [one for one in state.ranks if one.silent > SILENT]
    if silent:
        names = name_places(state.record, [one.sample.rank for one in silent])
        longest = max(one.silent for one in silent)
        yield f"{names}: no sample received for {longest:.0f} s; see whether its machine and its network work"


def _look(state: RunState, one: RankState) -> str:
    if state.record.code is not None:  # the process has ended
        return "py-spy shows where"
    return f"`py-spy dump --pid {one.sample.pid}` shows where" + (f" (on {one.machine})" if one.machine else "")


def _missing(state: RunState) -> Iterator[str]:
    """Yield which ranks have waited long in a collective, and for whom."""
    known = [one.sample for one in state.ranks if one.silent <= SILENT]
    waiting = [one for one in known if one.inside and one.since > LONG]
    others = [one.rank for one in known if not one.inside]
    if waiting:
        longest = max(waiting, key=lambda one: one.since)
        names = name_places(state.record, [one.rank for one in waiting])
        verb = "has" if len(waiting) == 1 else "have"
        whom = f"; {name_places(state.record, others)} did not call it yet" if others else ""
        yield f"{names} {verb} been in {longest.inside} for {longest.since:.0f} s{whom}"


def _memory(state: RunState) -> Iterator[str]:
    for one in state.ranks:
        if one.gpu is not None and one.gpu.memory and (one.gpu.used or 0) > NEARLY_FULL * one.gpu.memory:
            yield f"the memory of {one.device} is nearly full: use a smaller batch, or --strategy fsdp"


def _faults(state: RunState) -> Iterator[str]:
    for number, fault in enumerate(state.record.faults, 1):
        yield f"fault {number}: {fault}"
