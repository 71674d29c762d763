"""Finding the rank that the others wait for, and what it does instead."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from duoka.board import Board, Parting, Progress
from duoka.launchers.crew import Crew, Worker
from duoka.launchers.processes import is_asleep, is_stopped, odd_state, work_done
from duoka.launchers.stacks import in_debugger, in_torch
from duoka.worker import STACKS_SIGNAL

TO_ANSWER = 1.0  # seconds that a worker may take to write its stacks
TO_LOOK = 1.0  # seconds after which a rank that is looked at twice a second has not been able to look
TO_FOLLOW = 1.0  # seconds after which a rank that waits for one that is done waits in vain
TO_TELL = 3.0  # seconds that another machine has to tell first which of its ranks is missing
MULTIPLE = 20  # of the slowest step so far: what a rank waits for one that is idle
LEAST = 60.0  # seconds: it is never less


@dataclass(frozen=True, slots=True)
class Limits:
    """How many seconds a rank waits for another.

    start: in the start and the first step, and at most. step: after the first step, whatever the others do; None:
        a multiple of the slowest step so far, and only for a rank that is idle.
    patient: where no `step` is given, one that works is waited for without a limit.
    """

    start: float
    step: float | None = None
    patient: bool = False

    def after(self, steps: int, slowest: float) -> float:
        """The limit after so many steps, of which the slowest but for the first took so many seconds."""
        if self.step is not None and steps > 0:
            return self.step
        return min(self.start, max(LEAST, MULTIPLE * slowest)) if steps > 1 else self.start


@dataclass(frozen=True, slots=True)
class Stuck:
    """Some ranks wait in a collective that others do not come to.

    number: of the collective. seconds: since when they wait. limit: how long they may.
    missing: who does not come; nobody, where all came and it does not end.
    parting: how the ranks disagree on which collective it is.
    stacks: by rank, of all that could tell. odd: by rank, what keeps its process from running.
    asleep: the ranks whose processes wait for something.
    at_exit: nobody waits for the missing ones but this process: their scripts have ended, and they do not exit.
    within: of the ranks that do not come, and could not look where they are, those that are somewhere in torch.
    text: what the collective is, where only ranks of other machines wait in it.
    afar: the ranks of other machines that have not come either, as far as those tell.
    """

    number: int
    seconds: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    parting: Parting | None = None
    limit: float = 0.0
    stacks: dict[int, str] = field(default_factory=dict)
    odd: dict[int, str] = field(default_factory=dict)
    asleep: tuple[int, ...] = ()
    within: tuple[int, ...] = ()
    at_exit: bool = False
    text: str = ""
    afar: tuple[int, ...] = ()

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that are not where the others are: missing, else stopped; nobody, where that cannot be told."""
        return self.missing or tuple(rank for rank in self.waiting if rank in self.odd)


class Idleness:
    """Since when workers have done nothing: used no processor, read and written nothing, their children included.

    It is looked at now and then. Whoever works, however slowly, is not idle, so that a long save, a download or
    an evaluation on one rank is not taken for a hang.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}

    def seconds(self, worker: Worker) -> float:
        """For how long `worker` has done nothing, as far as was looked."""
        done, now = work_done(worker.pid), time.monotonic()
        before, since = self._seen.get(worker.rank, (-1, now))
        if done != before:
            self._seen[worker.rank] = done, now
            return 0.0
        return now - since


def find_stuck(
    board: Board,
    workers: Sequence[Worker],
    limits: Limits,
    idleness: Idleness,
    afar: Mapping[int, Progress] = MappingProxyType({}),
) -> Stuck | None:
    """Whether ranks wait in a collective that others do not come to, for longer than the limit.

    Ranks that came to different ones are stuck at once. Where all came to the same, it mostly ends by itself: only
    the longest limit holds, unless one of them is stopped; or the network's own, for a script that is left alone.

    afar: how far the ranks of other machines are. They may be waited for, and wait, but to blame is for their own
    machine, which sees whether they work.
    """
    if parting := board.parting() or (None if limits.patient else _parted(board, afar)):
        waiting = tuple(rank for ranks, _ in parting.sides for rank in ranks)
        return Stuck(parting.number, 0.0, waiting, (), parting)
    present = [worker for worker in workers if worker.failed or not worker.done]
    if not present:
        return None
    progress = {worker.rank: board.read(worker.rank) for worker in present}
    number, waits, missing = _waiting(present, progress, afar)
    if not waits or not (missing or waits.keys() & progress.keys()):
        return None
    seconds = max(waits.values())
    stopped = [worker for worker in present if is_stopped(worker.pid)]
    missing = [worker for worker in missing if worker in stopped] or missing
    limit = limits.after(min(one.steps for one in progress.values()), max(one.slowest for one in progress.values()))
    if not (missing or stopped):
        limit = limits.start
        if limits.patient or seconds <= limit + (TO_TELL if afar else 0.0):
            return None
    elif not _waited(seconds, limit, limits, missing or stopped, idleness):
        return None
    texts = (one.text for one in afar.values() if one.waiting and one.number == number)
    return Stuck(
        number,
        seconds,
        tuple(waits),
        tuple(worker.rank for worker in missing),
        limit=limit,
        text=next(texts, ""),
        afar=tuple(rank for rank, one in afar.items() if one.begun < number),
    )


def _waiting(
    present: Sequence[Worker], progress: Mapping[int, Progress], afar: Mapping[int, Progress]
) -> tuple[int, dict[int, float], list[Worker]]:
    """In which collective ranks wait, for how many seconds each of them, and who of this machine does not come."""
    everywhere = {**progress, **afar}
    number, missing = _first_missed(present, progress, afar)
    waits = {rank: one.seen - one.since for rank, one in everywhere.items() if one.waiting and one.number >= number}
    unseen = _waits_unseen(present, progress)
    seen_missing = [worker for worker in missing if worker.rank not in unseen]
    missing = seen_missing if afar else seen_missing or missing
    if not waits and unseen:
        waits = unseen
        number = max(progress[rank].begun + 1 for rank in unseen)
        missing = [worker for worker in present if worker.rank not in unseen]
    return number, waits, missing


def _parted(board: Board, afar: Mapping[int, Progress]) -> Parting | None:
    """Where ranks of another machine wait in another collective than the one that those of this one came to."""
    for rank, one in afar.items():
        here = tuple(mine for mine in board.ranks if one.waiting and board.remembers(mine, one.number))
        if here and (text := board.text(here[0], one.number)) != one.text:
            return Parting(one.number, ((here, text), ((rank,), one.text)))
    return None


def find_staying(workers: Sequence[Worker], limits: Limits, idleness: Idleness) -> Stuck | None:
    """Whether workers do not exit after their scripts have ended, and do nothing, for the longest limit."""
    staying = [worker for worker in workers if worker.alive and worker.ending is not None]
    seconds = min((time.monotonic() - worker.ending.time for worker in staying if worker.ending), default=0.0)
    if seconds <= limits.start / 2:
        return None
    idle = min([idleness.seconds(worker) for worker in staying])
    if seconds <= limits.start or idle <= limits.start / 2 - 1:
        return None
    ranks = tuple(worker.rank for worker in staying)
    return Stuck(0, seconds, (), ranks, limit=limits.start, at_exit=True)


def _first_missed(
    present: Sequence[Worker], progress: Mapping[int, Progress], afar: Mapping[int, Progress]
) -> tuple[int, list[Worker]]:
    """The first collective in which ranks wait for others that wait in none, and those.

    Where all wait, it is the last, and those that are in one before it, unless they may wait there for ranks of other
    machines; 0 where nobody does.
    """
    numbers = sorted({one.number for one in (*progress.values(), *afar.values()) if one.waiting})
    for number in numbers:
        behind = [worker for worker in present if progress[worker.rank].begun < number]
        if busy := [worker for worker in behind if not progress[worker.rank].waiting]:
            return number, busy
    last = numbers[-1] if numbers else 0
    return last, [] if afar else [worker for worker in present if progress[worker.rank].begun < last]


def _waits_unseen(present: Sequence[Worker], progress: Mapping[int, Progress]) -> dict[int, float]:
    """The ranks that cannot look at where they are, as their interpreter's lock is held, and yet are asleep.

    torch waits so inside of DistributedDataParallel's second step. The seconds since each looked.
    """
    now = time.monotonic()
    late = {worker.rank: now - progress[worker.rank].seen for worker in present if is_asleep(worker.pid)}
    return {rank: seconds for rank, seconds in late.items() if seconds > TO_LOOK}


def _waited(seconds: float, limit: float, limits: Limits, for_whom: Sequence[Worker], idleness: Idleness) -> bool:
    """Whether somebody waited for too long. A limit that nobody chose holds for ranks that are idle only."""
    if limits.step is not None or (seconds > limits.start and not limits.patient):
        return seconds > limit
    if seconds <= limit / 2:
        return False
    idle = max([idleness.seconds(worker) for worker in for_whom])
    return seconds > limit and idle > limit / 2 - 1


def waiting_in_vain(board: Board, workers: Sequence[Worker]) -> list[Worker]:
    """Those that wait in a collective that one whose script has ended never came to."""
    endings = [worker.ending for worker in workers if worker.ending is not None]
    left = [board.read(worker.rank).begun for worker in workers if worker.done]
    ended_at = min((ending.time for ending in endings), default=0.0)
    going_on = [worker for worker in workers if left and not worker.done]
    return [worker for worker in going_on if _waits_beyond(board.read(worker.rank), min(left), ended_at)]


def _waits_beyond(progress: Progress, number: int, ended_at: float) -> bool:
    waited = progress.seen - max(progress.since, ended_at)
    return progress.waiting and progress.number > number and waited > TO_FOLLOW


def ask_for_stacks(stuck: Stuck, crew: Crew) -> Stuck:
    """The same with the stacks of all ranks that can tell."""
    asked = [worker for worker in crew.workers if worker.alive]
    asleep = tuple(worker.rank for worker in asked if is_asleep(worker.pid))  # until it is asked
    for worker in asked:
        os.ftruncate(worker.stacks, 0)
        os.lseek(worker.stacks, 0, os.SEEK_SET)  # where the worker goes on to write: it shares the file
        os.kill(worker.pid, STACKS_SIGNAL)
    crew.wait(lambda: all(_answered(worker) for worker in asked), TO_ANSWER)
    return replace(
        stuck,
        stacks={worker.rank: text for worker in asked if (text := read_stacks(worker))},
        odd={worker.rank: state for worker in asked if (state := odd_state(worker.pid))},
        asleep=asleep,
    )


def look_closer(stuck: Stuck, board: Board) -> Stuck:
    """The same, where the stacks tell more than the board: not every rank can look where it is.

    One that is in torch and holds the interpreter's lock mostly waits there too, so that another is to blame; if
    there is no other, it is among those that do not meet.
    """
    now = time.monotonic()
    blind = [rank for rank in stuck.missing if now - board.read(rank).seen > TO_LOOK and rank not in stuck.odd]
    within = tuple(rank for rank in blind if in_torch(stuck.stacks.get(rank, "")))
    missing = tuple(rank for rank in stuck.missing if rank not in within)
    return replace(stuck, missing=missing) if missing else replace(stuck, missing=(), within=within)


def is_debugged(stuck: Stuck, ranks: Collection[int]) -> bool:
    """Whether one of these ranks is in a debugger, and so waits for a person."""
    return any(in_debugger(stuck.stacks.get(rank, "")) for rank in ranks)


def read_stacks(worker: Worker) -> str:
    """What faulthandler wrote of a worker: when it was asked, or in a crash."""
    size = os.fstat(worker.stacks).st_size
    return os.pread(worker.stacks, size, 0).decode(errors="replace")


def _answered(worker: Worker) -> bool:
    return not worker.alive or is_stopped(worker.pid) or "<module>" in read_stacks(worker)
