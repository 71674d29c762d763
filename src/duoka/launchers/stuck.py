"""Find the rank for which the others wait, and where it is. Why: docs/decisions/0060-waiting.md."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from duoka.launchers.processes import is_asleep, is_stopped, odd_state, work_done
from duoka.launchers.stacks import in_debugger, in_torch
from duoka.launchers.worker_group import Worker, WorkerGroup
from duoka.supervision.status_board import CollectiveMismatch, RankProgress, StatusBoard
from duoka.worker import STACKS_SIGNAL

TO_ANSWER = 1.0  # seconds for a worker to dump its stacks
TO_LOOK = 1.0  # seconds after which a rank's status, updated twice a second, counts as outdated
TO_FOLLOW = 1.0  # seconds after which a rank that waits for an ended one counts as blocked
TO_TELL = 3.0  # seconds in which another machine can report its missing rank first
IDLE_MULTIPLE = 20  # times the slowest step so far: how long a rank waits for an idle one
LEAST = 60.0  # seconds: the least limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits, in seconds, for how long a rank waits for another.

    start: until the first step is done, and the longest limit. step: after the first step, whatever the other does;
    None:
        a multiple of the slowest step so far, and only if the other is idle.
    wait_while_busy: without `step`, wait without limit for a rank that works.
    """

    start: float
    step: float | None = None
    wait_while_busy: bool = False

    def after(self, steps: int, slowest: float) -> float:
        """Return the limit after `steps` steps. slowest: seconds of the slowest one, without the first."""
        if self.step is not None and steps > 0:
            return self.step
        return min(self.start, max(LEAST, IDLE_MULTIPLE * slowest)) if steps > 1 else self.start


@dataclass(frozen=True, slots=True)
class Stuck:
    """Some ranks wait in a collective, and others do not join it.

    number: of the collective. seconds: since when they wait. limit: the limit, in seconds.
    missing: ranks that do not join it; empty if all joined and it does not end.
    mismatch: the different collectives that the ranks called.
    stacks: stack dumps by rank. odd: reasons why a rank's process does not run, by rank.
    asleep: ranks whose processes sleep.
    at_exit: the scripts have ended, and the processes of the `missing` ranks do not exit.
    within: ranks that do not join and could not update their status, as they are inside torch.
    text: the name of the collective, if only ranks of other machines wait in it.
    remote: ranks of other machines that have not joined it either.
    """

    number: int
    seconds: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    mismatch: CollectiveMismatch | None = None
    limit: float = 0.0
    stacks: dict[int, str] = field(default_factory=dict)
    odd: dict[int, str] = field(default_factory=dict)
    asleep: tuple[int, ...] = ()
    within: tuple[int, ...] = ()
    at_exit: bool = False
    text: str = ""
    remote: tuple[int, ...] = ()

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that cause the wait: the missing, else the stopped ones; empty if unknown."""
        return self.missing or tuple(rank for rank in self.waiting if rank in self.odd)


class IdleClock:
    """Measures for how long workers and their child processes have used no CPU and read and written nothing.

    A long save, a download or an evaluation on one rank is thus not taken for a hang.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}

    def seconds(self, worker: Worker) -> float:
        """Return for how many seconds `worker` has been idle, as observed by the calls of this method."""
        done, now = work_done(worker.pid), time.monotonic()
        before, since = self._seen.get(worker.rank, (-1, now))
        if done != before:
            self._seen[worker.rank] = done, now
            return 0.0
        return now - since


def find_stuck(
    board: StatusBoard,
    workers: Sequence[Worker],
    limits: Limits,
    idle_clock: IdleClock,
    remote: Mapping[int, RankProgress] = MappingProxyType({}),
) -> Stuck | None:
    """Return where ranks have waited in a collective for others for longer than the limit; None if they have not.

    Ranks that called different collectives are reported at once. If all have joined the same one, it mostly ends by
    itself: only the longest limit holds, unless a rank is stopped; and none for a script with its own
    torch.distributed, where the network's limit holds.

    remote: progress of the ranks of other machines. They may wait or be waited for, but only their own machine, which
    sees whether they work, reports them as missing.
    """
    if mismatch := board.first_mismatch() or (None if limits.wait_while_busy else _remote_mismatch(board, remote)):
        waiting = tuple(rank for ranks, _ in mismatch.sides for rank in ranks)
        return Stuck(mismatch.number, 0.0, waiting, (), mismatch)
    present = [worker for worker in workers if worker.failed or not worker.done]
    if not present:
        return None
    progress = {worker.rank: board.read(worker.rank) for worker in present}
    number, waits, missing = _waiting(present, progress, remote)
    if not waits or not (missing or waits.keys() & progress.keys()):
        return None
    seconds = max(waits.values())
    stopped = [worker for worker in present if is_stopped(worker.pid)]
    missing = [worker for worker in missing if worker in stopped] or missing
    limit = limits.after(min(one.steps for one in progress.values()), max(one.slowest for one in progress.values()))
    if not (missing or stopped):
        limit = limits.start
        if limits.wait_while_busy or seconds <= limit + (TO_TELL if remote else 0.0):
            return None
    elif not _waited(seconds, limit, limits, missing or stopped, idle_clock):
        return None
    texts = (one.text for one in remote.values() if one.waiting and one.number == number)
    return Stuck(
        number,
        seconds,
        tuple(waits),
        tuple(worker.rank for worker in missing),
        limit=limit,
        text=next(texts, ""),
        remote=tuple(rank for rank, one in remote.items() if one.begun < number),
    )


def _waiting(
    present: Sequence[Worker], progress: Mapping[int, RankProgress], remote: Mapping[int, RankProgress]
) -> tuple[int, dict[int, float], list[Worker]]:
    """Return the collective in which ranks wait, for how many seconds each, and this machine's missing workers."""
    everywhere = {**progress, **remote}
    number, missing = _first_missed(present, progress, remote)
    waits = {rank: one.seen - one.since for rank, one in everywhere.items() if one.waiting and one.number >= number}
    asleep = _asleep_with_lock(present, progress)
    awake_missing = [worker for worker in missing if worker.rank not in asleep]
    missing = awake_missing if remote else awake_missing or missing
    if not waits and asleep:
        waits = asleep
        number = max(progress[rank].begun + 1 for rank in asleep)
        missing = [worker for worker in present if worker.rank not in asleep]
    return number, waits, missing


def _remote_mismatch(board: StatusBoard, remote: Mapping[int, RankProgress]) -> CollectiveMismatch | None:
    """Return a mismatch between this machine's collective and one in which a rank of another machine waits."""
    for rank, one in remote.items():
        here = tuple(mine for mine in board.ranks if one.waiting and board.remembers(mine, one.number))
        if here and (text := board.text(here[0], one.number)) != one.text:
            return CollectiveMismatch(one.number, ((here, text), ((rank,), one.text)))
    return None


def find_not_exiting(workers: Sequence[Worker], limits: Limits, idle_clock: IdleClock) -> Stuck | None:
    """Return the workers whose scripts have ended and which have been idle for the longest limit; None if none."""
    staying = [worker for worker in workers if worker.alive and worker.ending is not None]
    seconds = min((time.monotonic() - worker.ending.time for worker in staying if worker.ending), default=0.0)
    if seconds <= limits.start / 2:
        return None
    idle = min([idle_clock.seconds(worker) for worker in staying])
    if seconds <= limits.start or idle <= limits.start / 2 - 1:
        return None
    ranks = tuple(worker.rank for worker in staying)
    return Stuck(0, seconds, (), ranks, limit=limits.start, at_exit=True)


def _first_missed(
    present: Sequence[Worker], progress: Mapping[int, RankProgress], remote: Mapping[int, RankProgress]
) -> tuple[int, list[Worker]]:
    """Return the first collective in which ranks wait for others that wait in none, and those others.

    If all wait: the last one, and the ranks that wait in an earlier one, unless those may wait for ranks of other
    machines. 0 if no rank waits.
    """
    numbers = sorted({one.number for one in (*progress.values(), *remote.values()) if one.waiting})
    for number in numbers:
        behind = [worker for worker in present if progress[worker.rank].begun < number]
        if busy := [worker for worker in behind if not progress[worker.rank].waiting]:
            return number, busy
    last = numbers[-1] if numbers else 0
    return last, [] if remote else [worker for worker in present if progress[worker.rank].begun < last]


def _asleep_with_lock(present: Sequence[Worker], progress: Mapping[int, RankProgress]) -> dict[int, float]:
    """Return the ranks that cannot update their status, as the interpreter's lock is held, but sleep; with seconds.

    Torch waits so inside the second step of DistributedDataParallel.
    """
    now = time.monotonic()
    late = {worker.rank: now - progress[worker.rank].seen for worker in present if is_asleep(worker.pid)}
    return {rank: seconds for rank, seconds in late.items() if seconds > TO_LOOK}


def _waited(seconds: float, limit: float, limits: Limits, for_whom: Sequence[Worker], idle_clock: IdleClock) -> bool:
    """Return whether a limit is exceeded. Unless the user chose the limit, a missing rank must be idle, too."""
    if limits.step is not None or (seconds > limits.start and not limits.wait_while_busy):
        return seconds > limit
    if seconds <= limit / 2:
        return False
    idle = max([idle_clock.seconds(worker) for worker in for_whom])
    return seconds > limit and idle > limit / 2 - 1


def waiting_for_ended(board: StatusBoard, workers: Sequence[Worker]) -> list[Worker]:
    """Return the workers that wait in a collective which a worker whose script has ended never joined."""
    endings = [worker.ending for worker in workers if worker.ending is not None]
    left = [board.read(worker.rank).begun for worker in workers if worker.done]
    ended_at = min((ending.time for ending in endings), default=0.0)
    going_on = [worker for worker in workers if left and not worker.done]
    return [worker for worker in going_on if _waits_beyond(board.read(worker.rank), min(left), ended_at)]


def _waits_beyond(progress: RankProgress, number: int, ended_at: float) -> bool:
    waited = progress.seen - max(progress.since, ended_at)
    return progress.waiting and progress.number > number and waited > TO_FOLLOW


def collect_stacks(stuck: Stuck, group: WorkerGroup) -> Stuck:
    """Return a copy of `stuck` with the stack dumps of all workers that can write them."""
    asked = [worker for worker in group.workers if worker.alive]
    asleep = tuple(worker.rank for worker in asked if is_asleep(worker.pid))  # before the signal wakes them
    for worker in asked:
        os.ftruncate(worker.stacks, 0)
        os.lseek(worker.stacks, 0, os.SEEK_SET)  # the worker shares the file's position
        os.kill(worker.pid, STACKS_SIGNAL)
    group.wait(lambda: all(_answered(worker) for worker in asked), TO_ANSWER)
    return replace(
        stuck,
        stacks={worker.rank: text for worker in asked if (text := read_stacks(worker))},
        odd={worker.rank: state for worker in asked if (state := odd_state(worker.pid))},
        asleep=asleep,
    )


def refine_with_stacks(stuck: Stuck, board: StatusBoard) -> Stuck:
    """Return a copy of `stuck` corrected by what the stacks show beyond the status board.

    A missing rank that is inside torch and holds the interpreter's lock mostly waits there, so another rank is the
    cause; if there is no other, it is reported in `within`.
    """
    now = time.monotonic()
    blind = [rank for rank in stuck.missing if now - board.read(rank).seen > TO_LOOK and rank not in stuck.odd]
    within = tuple(rank for rank in blind if in_torch(stuck.stacks.get(rank, "")))
    missing = tuple(rank for rank in stuck.missing if rank not in within)
    return replace(stuck, missing=missing) if missing else replace(stuck, missing=(), within=within)


def is_debugged(stuck: Stuck, ranks: Collection[int]) -> bool:
    """Return whether one of these ranks is in a debugger."""
    return any(in_debugger(stuck.stacks.get(rank, "")) for rank in ranks)


def read_stacks(worker: Worker) -> str:
    """Read the stacks that faulthandler wrote for a worker, on request or in a crash."""
    size = os.fstat(worker.stacks).st_size
    return os.pread(worker.stacks, size, 0).decode(errors="replace")


def _answered(worker: Worker) -> bool:
    return not worker.alive or is_stopped(worker.pid) or "<module>" in read_stacks(worker)
