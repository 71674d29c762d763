"""Find the rank for which the others wait, from the status board, and where it is, from stack dumps.

Why: docs/decisions/0060-waiting.md.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from duoka.launchers.worker import STACKS_SIGNAL
from duoka.launchers.workers import Worker, WorkerGroup
from duoka.supervision.status_board import CollectiveMismatch, RankProgress, StatusBoard
from duoka.supervision.tracebacks import OURS, RUNS_SCRIPTS
from duoka.system.processes import odd_state, process_state, work_done
from duoka.system.user_code import is_installed, is_users

TO_ANSWER = 1.0  # seconds for a worker to dump its stacks
TO_LOOK = 1.0  # seconds after which a rank's status, updated twice a second, counts as outdated
TO_FOLLOW = 1.0  # seconds after which a rank that waits for an ended one counts as blocked
TO_TELL = 3.0  # seconds in which another machine can report its missing rank first
IDLE_MULTIPLE = 20  # times the slowest step so far: how long a rank waits for an idle one
LEAST = 60.0  # seconds: the least limit
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits, in seconds, for how long a rank waits for another."""

    start: float  # until the first step is done, and the longest limit
    # After the first step, whatever the other does; None: a multiple of the slowest step, if the other is idle.
    step: float | None = None
    wait_while_busy: bool = False  # without `step`, wait without limit for a rank that works

    def after(self, steps: int, slowest: float) -> float:
        """Return the limit after `steps` steps. slowest: seconds of the slowest one, without the first."""
        if self.step is not None and steps > 0:
            return self.step
        return min(self.start, max(LEAST, IDLE_MULTIPLE * slowest)) if steps > 1 else self.start


@dataclass(frozen=True, slots=True)
class Stuck:
    """Some ranks wait in a collective, and others do not join it."""

    number: int  # of the collective
    seconds: float  # since when they wait
    waiting: tuple[int, ...]
    missing: tuple[int, ...]  # ranks that do not join it; empty if all joined and it does not end
    mismatch: CollectiveMismatch | None = None  # the different collectives that the ranks called
    limit: float = 0.0  # seconds; 0: the script's own
    stacks: dict[int, str] = field(default_factory=dict)  # stack dumps by rank
    odd: dict[int, str] = field(default_factory=dict)  # reasons why a rank's process does not run, by rank
    asleep: tuple[int, ...] = ()  # ranks whose processes sleep
    within: tuple[int, ...] = ()  # ranks that do not join and could not update their status, as they are inside torch
    at_exit: bool = False  # the scripts have ended, and the processes of the `missing` ranks do not exit
    text: str = ""  # the name of the collective, if only ranks of other machines wait in it
    remote: tuple[int, ...] = ()  # ranks of other machines that have not joined it either

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

    remote: progress of the ranks of other machines. They may wait or be waited for, but only their own machine, which
    sees whether they work, reports them as missing.
    """
    # Different collectives are reported at once. Other machines send names, not digests; those of a script's own
    # collectives hold its lines, and shapes that may differ between ranks.
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
    stopped = [worker for worker in present if process_state(worker.pid) == "T"]
    missing = [worker for worker in missing if worker in stopped] or missing  # a stopped rank is the cause, if any
    ranks = progress.values()
    limit = limits.after(min(rank.steps for rank in ranks), max(rank.slowest for rank in ranks))
    if not (missing or stopped):
        # All have joined it, and it mostly ends by itself: only the longest limit holds; and none for a script with
        # its own torch.distributed, where the network's limit holds.
        limit = limits.start
        if limits.wait_while_busy or seconds <= limit + (TO_TELL if remote else 0.0):
            return None
    elif not _waited(seconds, limit, limits, missing or stopped, idle_clock):
        return None
    texts = (other.text for other in remote.values() if other.waiting and other.number == number)
    return Stuck(
        number,
        seconds,
        tuple(waits),
        tuple(worker.rank for worker in missing),
        limit=limit,
        text=next(texts, ""),
        remote=tuple(rank for rank, other in remote.items() if other.begun < number),
    )


def _waiting(
    present: Sequence[Worker], progress: Mapping[int, RankProgress], remote: Mapping[int, RankProgress]
) -> tuple[int, dict[int, float], list[Worker]]:
    """Return the collective in which ranks wait, for how many seconds each, and this machine's missing workers."""
    number, missing = _first_missed(present, progress, remote)
    waiting = {rank: its for rank, its in {**progress, **remote}.items() if its.waiting and its.number >= number}
    waits = {rank: its.seen - its.since for rank, its in waiting.items()}
    # Ranks that cannot update their status, as the interpreter's lock is held, but sleep. Torch waits so inside the
    # second step of DistributedDataParallel.
    sleeping = [worker.rank for worker in present if process_state(worker.pid) == "S"]
    late = {rank: time.monotonic() - progress[rank].seen for rank in sleeping}
    asleep = {rank: seconds for rank, seconds in late.items() if seconds > TO_LOOK}
    awake_missing = [worker for worker in missing if worker.rank not in asleep]
    missing = awake_missing if remote else awake_missing or missing
    if not waits and asleep:  # nobody shows a wait: take those for waiting that could not, in their next collective
        waits = asleep
        number = max(progress[rank].begun + 1 for rank in asleep)
        missing = [worker for worker in present if worker.rank not in asleep]
    return number, waits, missing


def _remote_mismatch(board: StatusBoard, remote: Mapping[int, RankProgress]) -> CollectiveMismatch | None:
    """Return a mismatch between this machine's collective and one in which a rank of another machine waits."""
    for rank, other in remote.items():
        here = tuple(mine for mine in board.ranks if other.waiting and board.remembers(mine, other.number))
        if here and (text := board.text(here[0], other.number)) != other.text:
            return CollectiveMismatch(other.number, ((here, text), ((rank,), other.text)))
    return None


def find_not_exiting(workers: Sequence[Worker], limits: Limits, idle_clock: IdleClock) -> Stuck | None:
    """Return the workers whose scripts have ended and which have been idle for the longest limit; None if none."""
    staying = [worker for worker in workers if worker.alive and worker.ending is not None]
    seconds = min((time.monotonic() - worker.ending.time for worker in staying if worker.ending), default=0.0)
    if seconds <= limits.start / 2:  # too early to look at /proc, which costs more than the board
        return None
    idle = min(idle_clock.seconds(worker) for worker in staying)
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
    numbers = sorted({its.number for its in (*progress.values(), *remote.values()) if its.waiting})
    for number in numbers:
        behind = [worker for worker in present if progress[worker.rank].begun < number]
        if busy := [worker for worker in behind if not progress[worker.rank].waiting]:
            return number, busy
    last = numbers[-1] if numbers else 0
    return last, [] if remote else [worker for worker in present if progress[worker.rank].begun < last]


def _waited(seconds: float, limit: float, limits: Limits, for_whom: Sequence[Worker], idle_clock: IdleClock) -> bool:
    """Return whether a limit is exceeded. Unless the user chose the limit, a missing rank must be idle, too."""
    if limits.step is not None or (seconds > limits.start and not limits.wait_while_busy):
        return seconds > limit
    if seconds <= limit / 2:  # too early to look at /proc
        return False
    idle = max(idle_clock.seconds(worker) for worker in for_whom)
    return seconds > limit and idle > limit / 2 - 1  # the clock started at the first call after half of the limit


def waiting_for_ended(board: StatusBoard, workers: Sequence[Worker]) -> list[Worker]:
    """Return the workers that wait in a collective which a worker whose script has ended never joined."""
    ended_at = min((worker.ending.time for worker in workers if worker.ending is not None), default=0.0)
    last = min((board.read(worker.rank).begun for worker in workers if worker.done), default=None)

    def waits(progress: RankProgress) -> bool:
        waited = progress.seen - max(progress.since, ended_at)
        return last is not None and progress.waiting and progress.number > last and waited > TO_FOLLOW

    return [worker for worker in workers if not worker.done and waits(board.read(worker.rank))]


def collect_stacks(stuck: Stuck, group: WorkerGroup) -> Stuck:
    """Return a copy of `stuck` with the stack dumps of all workers that can write them."""
    asked = [worker for worker in group.workers if worker.alive]
    # Before the signal wakes them.
    asleep = tuple(worker.rank for worker in asked if process_state(worker.pid) == "S")
    for worker in asked:
        os.ftruncate(worker.stacks, 0)
        os.lseek(worker.stacks, 0, os.SEEK_SET)  # the worker shares the file's position
        os.kill(worker.pid, STACKS_SIGNAL)

    def has_answered(worker: Worker) -> bool:  # a main thread's stack, the last that is dumped, ends at its module
        return not worker.alive or process_state(worker.pid) == "T" or "<module>" in read_stacks(worker)

    group.wait(lambda: all(map(has_answered, asked)), TO_ANSWER)
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


def read_stacks(worker: Worker) -> str:
    """Read the stacks that faulthandler wrote for a worker, on request or in a crash."""
    size = os.fstat(worker.stacks).st_size
    return os.pread(worker.stacks, size, 0).decode(errors="replace")


# Stack dumps of faulthandler.


def script_frames(text: str, most: int = 8) -> list[str]:
    """Return the script's innermost frames, innermost first; those of its main thread if the dump has them.

    text: one dump of all threads, as faulthandler writes it. most: number of frames.
    """
    threads = [_inside(_frames(block)) for block in re.split(r"\n(?=Thread |Current thread )", text)]
    scripts = [frames for frames, in_script in threads if in_script]
    others = [frames for frames, _ in threads if any(is_users(file) for file, _ in frames)]
    for frames in scripts or others or [frames for frames, _ in threads[-1:]]:
        return [line for file, line in frames if not file.startswith(OURS)][:most]
    return []


def _inside(frames: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], bool]:
    """Return the frames below the one that runs the script, and whether the script runs in this thread."""
    files = [file for file, _ in frames]
    if RUNS_SCRIPTS in files:
        return frames[: files.index(RUNS_SCRIPTS)], True
    below = next((depth for depth, file in enumerate(files) if file.startswith(OURS)), len(files))
    return frames[:below], False


def users_line(text: str) -> str | None:
    """Return the innermost line of the user's code as `data.py:17`; None if there is none."""
    for frame in map(FRAME.match, script_frames(text)):
        if frame is not None and is_users(frame["file"]):
            return f"{os.path.basename(frame['file'])}:{frame['line']}"
    return None


def in_torch(text: str) -> bool:
    """Return whether the script's thread is inside a function of torch that it called."""
    frame = next(map(FRAME.match, script_frames(text, most=1)), None)
    return frame is not None and "torch" in frame["file"].split(os.sep)[:-1] and is_installed(frame["file"])


def in_debugger(text: str) -> bool:
    """Return whether a thread is in Python's debugger or one based on it."""
    return any(os.path.basename(file) == "bdb.py" for file, _ in _frames(text))


def _frames(block: str) -> list[tuple[str, str]]:
    return [(match["file"], match[0]) for match in map(FRAME.match, block.splitlines()) if match]
