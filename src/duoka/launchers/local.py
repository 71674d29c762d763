"""Several workers on this machine: forked from this process, which imported torch once, and watched by it.

Where the run has other machines, too, each has a process like this one, and they tell each other (`machines`).

run_local    the whole run: one attempt, and after faults others, if that was asked for
attempt      one life of all workers: fork, store, go, watch, end, verdict
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

from duoka import environment
from duoka.board import Board, name_ranks
from duoka.errors import WorkerFailed
from duoka.launchers.crew import Crew
from duoka.launchers.heir import heir
from duoka.launchers.joining import together
from duoka.launchers.machines import Alone
from duoka.launchers.output import Outputs
from duoka.launchers.places import open_to
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
from duoka.launchers.verdict import Verdict, agreed, is_consequence, is_gloos, judge
from duoka.libc import names_from_files
from duoka.plan import Kind, Machines, Plan
from duoka.worker import Attempt, Observer, Unobserved

TICK = 0.5  # seconds between two looks at the board
GRACE = 0.5  # seconds that the other ranks have after the first bad end, to end by themselves
GRACE_AFAR = 2.0  # the same after one on another machine, as the script may end so there and here
TO_SHOW = 1.0  # seconds between two words to other machines on how far the ranks are
TO_DEBUG = 10.0  # seconds between two looks at whether a rank is still in a debugger
TO_STOP = {signal.SIGINT: 10, signal.SIGTERM: 30, signal.SIGHUP: 30}  # seconds to answer a signal


NEVER = 1e9  # seconds


def _tell(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _tell_nobody(text: str) -> None:
    """Of what rank 0's command tells of all ranks."""


def _note(text: str) -> None:
    _tell(f"duoka: {text}\n")


@dataclass(frozen=True, slots=True)
class Run:
    """What is the same for all attempts of a run.

    tell: shows what ended it. function: what is run, if no script. observer: what accompanies it. entropy: 64 bits
    for all random numbers that a script leaves to the system; None: new ones for each attempt. others: the other
    machines.
    """

    plan: Plan
    run_id: str
    outputs: Outputs
    signals: Signals
    tell: Callable[[str], None] = _tell
    function: Callable[[], object] | None = None
    observer: Observer = field(default_factory=Unobserved)
    entropy: int | None = None
    others: Alone = field(default_factory=Alone)


def run_local(plan: Plan) -> int:
    """Run `plan` with one worker for each device, again after faults, and return the exit code.

    Raises:
        OptionError: the log files cannot be made; or the machines cannot meet so.
        AskedError: the machines were not started to do the same.
        TimedOut: another machine did not come.
        WorkerFailed: a worker cannot be started.
    """
    try:
        with together(plan, _note) as (plan, run_id, others), _outputs(plan) as outputs:
            if plan.machines.count > 1 and plan.machines.each == "machine" and plan.verbosity != "quiet":
                is_or_are = "is" if plan.workers == 1 else "are"
                _note(f"{name_ranks(list(plan.ranks))} of {plan.world_size} {is_or_are} here")
            import_once(plan)
            with Signals() as signals:
                run = Run(plan, run_id, outputs, signals, others=others)
                tells_all = plan.machines.each == "machine" or plan.machines.number == 0

                def again(number: int) -> Verdict:
                    outputs.begin(number)
                    return attempt(run, number)

                return with_restarts(again, plan.restarts, signals, run.tell if tells_all else _tell_nobody)
    except KeyboardInterrupt:  # before there was a worker
        print("duoka: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


@contextmanager
def _outputs(plan: Plan) -> Iterator[Outputs]:
    outputs = Outputs(plan.log_dir, _ranks_with_a_log(plan))
    try:
        yield outputs
    finally:
        outputs.close()


def import_once(plan: Plan) -> None:
    """Import what every worker needs, in this process, which they are forked from.

    All of it lives as long as the run, so the garbage collector neither looks at it now, which takes time,
    nor in the workers, where its looking writes to, and so copies, the memory that they share.
    """
    environment.give_threads(plan.threads)
    gc.disable()

    if plan.kind is not Kind.DISTRIBUTED:
        import duoka.plain
        from duoka.private.torch import import_compiler

        import_compiler()  # the first optimizer of every worker would
    if plan.kind is Kind.API:
        import duoka.run  # noqa: F401
    gc.freeze()
    gc.enable()


def attempt(run: Run, number: int) -> Verdict:
    """One life of all workers, from the fork to the end of the last. What ended it is told, and returned.

    Every attempt has a board, a store and a prefix in it of its own, so that nothing of one reaches the next.
    """
    plan, others = run.plan, run.others
    board = Board.create(plan.workers, plan.ranks.start)
    crew = Crew(run.signals, others)
    others.begin(number)
    store = None
    try:
        _check_files(plan.workers)
        exchange = _exchange(plan)
        temporary = _temporary()
        entropy = _entropy(run, number)
        store = _file_for_a_store(plan)
        shared = Attempt(number, run.run_id, entropy, board, exchange, temporary, run.function, run.observer)
        crew.start(plan, replace(shared, gloo=others.gloo, key=others.key, store=store), run.outputs)
        pids = [worker.pid for worker in crew.workers]
        with heir(pids, temporary, others.let_go), _store(plan.machines, store) as port:  # a thread: after the forks
            others.start(crew, port)
            stuck, asked = _watch(plan, crew, board, others)
            if asked is not None:
                others.alarm(asked)
                _stop(crew, asked, board)
            elif crew.failed() or not crew.gone():
                others.alarm()
                crew.end()
            verdict = replace(judge(crew.workers, stuck, asked), saved=board.saved())
            verdict = others.conclude(verdict, crew)
        if _is_to_tell(plan.machines, verdict):
            run.tell(report(verdict, Scene(plan, board, crew.workers, run.outputs)))
        return verdict
    finally:
        crew.close()
        if store is not None:
            os.close(store)


def _is_to_tell(machines: Machines, verdict: Verdict) -> bool:
    """Whether this command tells of the end: where each is for one rank, the one whose rank it was, or the first."""
    own = verdict.why not in ("elsewhere", "agreed", "stopped")
    return machines.each == "machine" or machines.number == 0 or own


def _entropy(run: Run, number: int) -> int:
    """The same on all machines, which know the run by the same name, and another one in each attempt."""
    return random.Random(f"{run.run_id} {number}").getrandbits(64) if run.entropy is None else run.entropy


def _watch(plan: Plan, crew: Crew, board: Board, others: Alone) -> tuple[Stuck | None, signal.Signals | None]:
    """Watch until all are gone, or it is time to end them.

    Returns where the ranks are stuck, if they are, and the signal by which the run was asked to end.
    """
    limits = Limits(plan.timeout, plan.step_timeout, patient=plan.kind is Kind.DISTRIBUTED)
    idleness, debugged_until = Idleness(), 0.0

    def found() -> Stuck | None:
        waits = time.monotonic() > debugged_until and not others.is_debugging()
        return find_stuck(board, crew.workers, limits, idleness, others.progress()) if waits else None

    while not crew.gone():
        crew.listen(TICK)
        others.show(board, TO_SHOW, debugged=time.monotonic() < debugged_until)
        if crew.signals.stops:
            return None, crew.signals.stops[0]
        alarm = others.alarmed()
        if alarm is not None and alarm.asked is not None:
            return None, alarm.asked
        if crew.failed():
            others.alarm()
        if alarm is not None or (crew.failed() and not agreed(crew.workers)):
            others.show(board, last=True)
            crew.wait(lambda: crew.done() and others.have_shown(), GRACE if alarm is None else GRACE_AFAR)
            if alarm is not None or not agreed(crew.workers):
                return _missed(plan, crew, board, others), None
        elif stuck := found():
            stuck = look_closer(ask_for_stacks(stuck, crew), board)
            if not is_debugged(stuck, stuck.missing):
                return stuck, None
            debugged_until = time.monotonic() + TO_DEBUG
        elif waiting_in_vain(board, crew.workers):
            return None, None
        elif crew.done() and (stuck := find_staying(crew.workers, limits, idleness)):
            return ask_for_stacks(stuck, crew), None
    return None, None


def _missed(plan: Plan, crew: Crew, board: Board, others: Alone) -> Stuck | None:
    """For whom the ranks were stuck, or how they parted, where they noticed it themselves."""
    failed = [worker for worker in crew.workers if worker.failed]
    if not failed or not all(is_consequence(worker) or is_gloos(worker) for worker in failed):
        return None
    timed_out = any(worker.ending is not None and worker.ending.kind == "TimedOut" for worker in failed)
    limits = Limits(0.0 if timed_out else NEVER, patient=plan.kind is Kind.DISTRIBUTED)
    stuck = find_stuck(board, crew.workers, limits, Idleness(), others.progress())
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
    return range(0) if left_alone else range(max(1, plan.ranks.start), plan.ranks.stop)


def _exchange(plan: Plan) -> mmap.mmap | None:
    """Memory for small tensors that the ranks exchange on CPUs, if it is duoka that lets them, on one machine."""
    if plan.kind is Kind.DISTRIBUTED or plan.machines.count > 1:
        return None
    from duoka.view import nearby

    return mmap.mmap(-1, nearby.memory_size(plan.workers, nearby.LARGE_SLOT)) if nearby.is_possible() else None


def _file_for_a_store(plan: Plan) -> int | None:
    """Where the workers of one machine meet, which they inherit: no other user of the machine can reach it.

    A script that calls torch.distributed itself looks for a port. None: they meet at one.
    """
    if plan.kind is Kind.DISTRIBUTED or plan.machines.count > 1 or not os.path.isdir("/proc/self/fd"):
        return None
    return os.memfd_create("duoka-store")


def _temporary() -> str | None:
    """A path for a directory of the workers' own, as short as multiprocessing's: those of sockets may not be long."""
    try:
        return os.path.join(tempfile.gettempdir(), f"duoka-{secrets.token_urlsafe(6)}")
    except FileNotFoundError:  # nowhere can be written
        return None


def _check_files(workers: int) -> None:
    """See that this process may open what it is about to: torch's store ends a process that may not.

    Raises:
        WorkerFailed: it may not.
    """
    count, taken = 16 + 8 * workers, []
    try:
        for _ in range(count):
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        text = f"{workers} workers need {count} more open files, and this process may open {len(taken)} more"
        raise WorkerFailed(f"{text} ({error.strerror}); the limit is set by `ulimit -n 1024`") from None
    finally:
        for file in taken:
            os.close(file)


@contextmanager
def _store(machines: Machines, file: int | None) -> Iterator[int]:
    """A store for the workers of all machines on any free port, open while it is needed; its port.

    On one machine it is open to that alone. Where there are several, it is on machine 0: elsewhere the port is 0, and
    so it is where the workers meet in a file.
    """
    from duoka.rendezvous import tcp_store

    if machines.number > 0 or file is not None:
        yield 0
        return
    host = environment.LOOPBACK if machines.count == 1 else machines.host
    listener = open_to(host, 0)
    port = listener.getsockname()[1]
    store = tcp_store(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    try:
        with names_from_files():
            yield port
    finally:
        del store
