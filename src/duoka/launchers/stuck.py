"""Finding the rank that the others wait for, and what it does instead."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from duoka.board import Board, Progress
from duoka.launchers.crew import Crew, Worker
from duoka.launchers.processes import is_stopped, odd_state
from duoka.worker import STACKS_SIGNAL

TO_ANSWER = 1.0  # seconds that a worker may take to write its stacks
TO_FOLLOW = 1.0  # seconds after which a rank that waits for one that is done waits in vain


@dataclass(frozen=True, slots=True)
class Stuck:
    """Some ranks wait in a collective that others do not come to.

    number: of the collective. seconds: since when they wait.
    missing: who does not come; nobody, where all came and it does not end.
    apart: how the ranks disagree on which collective it is.
    stacks: by rank, of those that are missing. odd: by rank, what keeps its process from running.
    """

    number: int
    seconds: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    apart: str | None = None
    stacks: dict[int, str] = field(default_factory=dict)
    odd: dict[int, str] = field(default_factory=dict)


def find_stuck(board: Board, workers: Sequence[Worker], timeout: float) -> Stuck | None:
    """Whether ranks wait in a collective that others do not come to, for longer than `timeout` seconds.

    Ranks that came to different ones are stuck at once. Where all came to the same, it ends by itself or by
    the network's own timeout, unless one of them is stopped.
    """
    present = [worker for worker in workers if worker.failed or not worker.done]
    progress = {worker.rank: board.read(worker.rank) for worker in present}
    number = max((one.number for one in progress.values() if one.waiting), default=0)
    waiting = {rank: one for rank, one in progress.items() if one.waiting and one.number == number}
    if not waiting:
        return None
    seconds = time.monotonic() - min(one.since for one in waiting.values())
    missing = [rank for rank, one in progress.items() if one.begun < number]
    stuck = Stuck(number, seconds, tuple(waiting), tuple(missing), board.apart(number))
    in_vain = bool(missing) or any(is_stopped(worker.pid) for worker in present)
    return stuck if stuck.apart or (in_vain and seconds > timeout) else None


def waits_in_vain(board: Board, workers: Sequence[Worker]) -> bool:
    """Whether a rank waits in a collective that one whose script has ended never came to."""
    left = [board.read(worker.rank).begun for worker in workers if worker.done]
    return bool(left) and any(
        _waits_beyond(board.read(worker.rank), min(left)) for worker in workers if not worker.done
    )


def _waits_beyond(progress: Progress, number: int) -> bool:
    return progress.waiting and progress.number > number and time.monotonic() - progress.since > TO_FOLLOW


def ask_for_stacks(stuck: Stuck, crew: Crew) -> Stuck:
    """The same with the stacks of the ranks that are missing; of all ranks, where none is."""
    whom = stuck.missing or stuck.waiting
    asked = [worker for worker in crew.workers if worker.alive and worker.rank in whom]
    for worker in asked:
        os.kill(worker.pid, STACKS_SIGNAL)
    crew.wait(lambda: all(_answered(worker) for worker in asked), TO_ANSWER)
    return replace(
        stuck,
        stacks={worker.rank: text for worker in asked if (text := read_stacks(worker))},
        odd={worker.rank: state for worker in asked if (state := odd_state(worker.pid))},
    )


def read_stacks(worker: Worker) -> str:
    """What faulthandler wrote of a worker: when it was asked, or in a crash."""
    size = os.fstat(worker.stacks).st_size
    return os.pread(worker.stacks, size, 0).decode(errors="replace")


def _answered(worker: Worker) -> bool:
    return not worker.alive or "<module>" in read_stacks(worker)
