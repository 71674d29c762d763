"""Several workers on this machine: forked from this process, which imported torch once, and watched by it.

run_local    the whole run: one attempt, and after faults others, if that was asked for
attempt      one life of all workers: fork, store, go, watch, end, verdict
"""

from __future__ import annotations

import gc
import mmap
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

from duoka import environment
from duoka.board import Board
from duoka.errors import WorkerFailed
from duoka.launchers.crew import Crew
from duoka.launchers.heir import heir
from duoka.launchers.output import Outputs
from duoka.launchers.report import Scene, report
from duoka.launchers.restarts import with_restarts
from duoka.launchers.signals import Signals
from duoka.launchers.stuck import (
    Idleness,
    Limits,
    Stuck,
    ask_for_stacks,
    find_staying,
    find_stuck,
    is_debugged,
    look_closer,
    waiting_in_vain,
)
from duoka.launchers.verdict import Verdict, agreed, judge
from duoka.plan import Kind, Plan
from duoka.worker import Attempt, Observer, Unobserved

TICK = 0.5  # seconds between two looks at the board
GRACE = 0.5  # seconds that the other ranks have after the first bad end, to end by themselves
TO_DEBUG = 10.0  # seconds between two looks at whether a rank is still in a debugger
TO_STOP = {signal.SIGINT: 10, signal.SIGTERM: 30, signal.SIGHUP: 30}  # seconds to answer a signal


NEVER = Limits(1e9)


def _tell(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Run:
    """What is the same for all attempts of a run.

    tell: shows what ended it. function: what is run, if no script. observer: what accompanies it. entropy: 64 bits
    for all random numbers that a script leaves to the system; None: new ones for each attempt.
    """

    plan: Plan
    run_id: str
    outputs: Outputs
    signals: Signals
    tell: Callable[[str], None] = _tell
    function: Callable[[], object] | None = None
    observer: Observer = field(default_factory=Unobserved)
    entropy: int | None = None


def run_local(plan: Plan) -> int:
    """Run `plan` with one worker for each device, again after faults, and return the exit code.

    Raises:
        OptionError: the log files cannot be made.
        WorkerFailed: a worker cannot be started.
    """
    outputs = Outputs(plan.log_dir, _ranks_with_a_log(plan))
    try:
        import_once(plan)
        with Signals() as signals:
            run = Run(plan, secrets.token_hex(8), outputs, signals)

            def again(number: int) -> Verdict:
                outputs.begin(number)
                return attempt(run, number)

            return with_restarts(again, plan.restarts, signals, run.tell)
    except KeyboardInterrupt:  # before there was a worker
        print("duoka: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        outputs.close()


def import_once(plan: Plan) -> None:
    """Import what every worker needs, in this process, which they are forked from.

    All of it lives as long as the run, so the garbage collector neither looks at it now, which takes time,
    nor in the workers, where its looking writes to, and so copies, the memory that they share.
    """
    environment.give_threads(plan.threads)
    gc.disable()
    import torch.distributed

    if plan.kind is not Kind.DISTRIBUTED:
        import torch._dynamo  # noqa: F401  # the first optimizer of every worker would

        import duoka.plain
    if plan.kind is Kind.API:
        import duoka.run  # noqa: F401
    gc.freeze()
    gc.enable()


def attempt(run: Run, number: int) -> Verdict:
    """One life of all workers, from the fork to the end of the last. What ended it is told, and returned.

    Every attempt has a board, a store and a prefix in it of its own, so that nothing of one reaches the next.
    """
    board = Board.create(run.plan.world_size)
    crew = Crew(run.signals)
    try:
        _check_files(run.plan.world_size)
        exchange = _exchange(run.plan)
        entropy = secrets.randbits(64) if run.entropy is None else run.entropy
        temporary = _temporary()
        shared = Attempt(number, run.run_id, entropy, board, exchange, temporary, run.function, run.observer)
        crew.start(run.plan, shared, run.outputs)
        pids = [worker.pid for worker in crew.workers]
        with heir(pids, temporary), _store() as port:  # a thread: after the forks
            crew.go(port)
            stuck, asked = _watch(run.plan, crew, board)
            if asked is not None:
                _stop(crew, asked, board)
            elif crew.failed() or not crew.gone():
                crew.end()
        verdict = judge(crew.workers, stuck, asked)
        run.tell(report(verdict, Scene(run.plan, board, crew.workers, run.outputs)))
        return replace(verdict, saved=board.saved())
    finally:
        crew.close()


def _watch(plan: Plan, crew: Crew, board: Board) -> tuple[Stuck | None, signal.Signals | None]:
    """Watch until all are gone, or it is time to end them.

    Returns where the ranks are stuck, if they are, and the signal by which this process was asked to end.
    """
    limits = Limits(plan.timeout, plan.step_timeout, patient=plan.kind is Kind.DISTRIBUTED)
    idleness, debugged_until = Idleness(), 0.0
    while not crew.gone():
        crew.listen(TICK)
        if crew.signals.stops:
            return None, crew.signals.stops[0]
        if crew.failed() and not agreed(crew.workers):
            crew.wait(crew.done, GRACE)
            if not agreed(crew.workers):
                return _missed(plan, crew, board), None
        elif time.monotonic() > debugged_until and (stuck := find_stuck(board, crew.workers, limits, idleness)):
            stuck = look_closer(ask_for_stacks(stuck, crew), board)
            if not is_debugged(stuck, stuck.missing):
                return stuck, None
            debugged_until = time.monotonic() + TO_DEBUG
        elif waiting_in_vain(board, crew.workers):
            return None, None
        elif crew.done() and (stuck := find_staying(crew.workers, limits, idleness)):
            return ask_for_stacks(stuck, crew), None
    return None, None


def _missed(plan: Plan, crew: Crew, board: Board) -> Stuck | None:
    """For whom the ranks were stuck, or how they parted, where they noticed it themselves."""
    endings = [worker.ending for worker in crew.workers if worker.failed]
    if not all(ending is not None and ending.consequence for ending in endings):
        return None
    timed_out = any(ending is not None and ending.kind == "TimedOut" for ending in endings)
    stuck = find_stuck(board, crew.workers, Limits(0.0) if timed_out else NEVER, Idleness())
    if stuck is None:
        return None
    return look_closer(ask_for_stacks(replace(stuck, limit=plan.timeout), crew), board)


def _stop(crew: Crew, asked: signal.Signals, board: Board) -> None:
    """Pass a request to end on to the scripts, and wait for them to answer; a second Ctrl-C is the last word.

    Who is in torch, waiting for a rank that has ended, cannot answer.
    """
    pressed = int(asked is signal.SIGINT)  # a second one may be here already

    def is_over() -> bool:
        left = [worker for worker in crew.workers if not worker.done]
        return crew.gone() or crew.signals.interrupts > pressed or left == waiting_in_vain(board, crew.workers) != []

    crew.signal(asked)
    for _ in range(TO_STOP[asked]):
        if crew.wait(is_over, 1.0):
            break
        crew.wake()
    if crew.signals.interrupts > pressed:
        crew.kill()
    else:
        crew.end()


def _ranks_with_a_log(plan: Plan) -> range:
    """All but the first, which has the terminal. A script that is left alone prints there from every rank."""
    left_alone = plan.kind is Kind.DISTRIBUTED and plan.log_dir is None
    return range(0) if left_alone else range(1, plan.world_size)


def _exchange(plan: Plan) -> mmap.mmap | None:
    """Memory for small tensors that the ranks exchange on CPUs, if it is duoka that lets them."""
    if plan.kind is Kind.DISTRIBUTED:
        return None
    from duoka.view import nearby

    return mmap.mmap(-1, nearby.memory_size(plan.world_size)) if nearby.is_possible() else None


def _temporary() -> str | None:
    """A path for a directory of the workers' own, as short as multiprocessing's: those of sockets may not be long."""
    try:
        return os.path.join(tempfile.gettempdir(), f"duoka-{secrets.token_urlsafe(6)}")
    except FileNotFoundError:  # nowhere can be written
        return None


def _check_files(world_size: int) -> None:
    """See that this process may open what it is about to: torch's store ends a process that may not.

    Raises:
        WorkerFailed: it may not.
    """
    count, taken = 16 + 8 * world_size, []
    try:
        for _ in range(count):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        text = f"{world_size} workers need {count} more open files, and this process may open {len(taken)} more"
        raise WorkerFailed(f"{text} ({error.strerror}); the limit is set by `ulimit -n 1024`") from None
    finally:
        for file in taken:
            os.close(file)


@contextmanager
def _store() -> Iterator[int]:
    """A store for the workers on any free port of the loopback device, open while it is needed; its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    try:
        yield port
    finally:
        del store
