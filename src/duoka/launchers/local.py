"""Run several workers on this machine: forked from this process, which has imported torch, and watched by it.

In a run on several machines, each has a process like this one, and they exchange messages (`machines`).

run_local    the whole run: one attempt, and after faults others, if that was asked for
attempt      one attempt: fork, open the store, start, watch, end, find the cause
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
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta

from duoka.errors import WorkerFailed
from duoka.hardware import inventory
from duoka.launchers import hangs
from duoka.launchers.joining import join_machines
from duoka.launchers.machines import OtherMachines
from duoka.launchers.processes import Outputs, Signals, orphan_reaper
from duoka.launchers.report import ReportContext, other_stacks, report
from duoka.launchers.restarts import cause, next_plan, with_restarts
from duoka.launchers.verdict import Verdict, agreed, is_abort, is_consequence, judge, was_too_late
from duoka.launchers.worker import Attempt, Observer
from duoka.launchers.workers import WorkerGroup
from duoka.network.connection import listen_on
from duoka.planning.plan import Kind, Machines, Plan
from duoka.supervision.status_board import StatusBoard, name_ranks
from duoka.system import environment
from duoka.system.libc import names_from_files
from duoka.system.messages import say
from duoka.watching.record import PublishedRun

TICK = 0.5  # seconds between two reads of the status board
TO_END = 2.0  # seconds for ranks to end by themselves after they called different collectives
GRACE = 0.5  # seconds for the other ranks to end by themselves after the first bad end
REMOTE_GRACE = 2.0  # the same after one on another machine, as the scripts may end in the same way
TO_SHOW = 1.0  # seconds between two progress messages to other machines
TO_DEBUG = 10.0  # seconds between two checks whether a rank is still in a debugger
TO_STOP = {signal.SIGINT: 10, signal.SIGTERM: 30, signal.SIGHUP: 30}  # seconds for a script to end after a signal
NEVER = 1e9  # seconds


def _write(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Settings and resources of all attempts of a run."""

    plan: Plan
    run_id: str
    outputs: Outputs
    signals: Signals
    record: PublishedRun  # what other processes see of the run
    write: Callable[[str], None] = _write  # prints the report
    function: Callable[[], object] | None = None  # runs instead of the script
    observer: Observer = field(default_factory=Observer)  # of the script in each worker
    # 64 bits for all random numbers that a script leaves to the system; None: new ones for each attempt.
    entropy: int | None = None
    others: OtherMachines = field(default_factory=OtherMachines)


def run_local(plan: Plan) -> int:
    """Run `plan` with one worker for each device, restart it after faults, and return the exit code.

    Raises as `join_machines`; OptionError if the log files cannot be created, WorkerFailed if a worker cannot be
    started.
    """
    try:
        with join_machines(plan, say) as (plan, run_id, others), closing(outputs_of(plan)) as outputs:
            if plan.machines.count > 1 and plan.machines.each == "machine" and plan.verbosity != "quiet":
                is_or_are = "is" if plan.workers == 1 else "are"
                say(f"{name_ranks(plan.ranks)} of {plan.world_size} {is_or_are} here")
            import_once(plan)
            with Signals() as signals, closing(_record(plan, run_id)) as record:
                run = RunContext(plan, run_id, outputs, signals, record, others=others)
                last: Verdict | None = None

                def next_attempt(number: int) -> Verdict:
                    nonlocal run, last
                    if last is not None:  # without a lost device, or with fewer rows where memory ran out
                        run = replace(run, plan=next_plan(run.plan, last, inventory.read, say))
                    outputs.begin(number)
                    last = attempt(run, number)
                    return last

                # Where each command is one rank, rank 0's reports the end of all.
                reports = plan.machines.each == "machine" or plan.machines.number == 0
                write = run.write if reports else lambda text: None
                code = with_restarts(next_attempt, plan.restarts, signals, write)
                record.ended(code)
                return code
    except KeyboardInterrupt:  # before there was a worker
        say("interrupted")
        return 128 + signal.SIGINT


def _record(plan: Plan, run_id: str) -> PublishedRun:
    """Return the record of the run. Commands that an engine starts have the same options: only one reports."""
    if plan.report is None or (plan.machines.engine and plan.machines.number > 0):
        return PublishedRun(plan, run=run_id)
    from duoka.watching.page import ReportedRun

    return ReportedRun(plan, plan.report, say, run=run_id)


def outputs_of(plan: Plan) -> Outputs:
    """Return log files of all ranks but the first, which has the terminal.

    There are none for a script with its own torch.distributed, which prints from every rank, unless asked for.
    """
    left_alone = plan.kind is Kind.DISTRIBUTED and plan.log_dir is None
    return Outputs(plan.log_dir, range(0) if left_alone else range(max(1, plan.ranks.start), plan.ranks.stop))


def import_once(plan: Plan) -> None:
    """Import what every worker needs before forking them.

    The imported objects exist as long as the run. So the garbage collector is disabled meanwhile, to save time, and
    the objects are frozen: collecting in the workers would write to, and so copy, the memory that they share.
    """
    environment.set_pool_sizes(plan.threads)  # before torch, which reads them when it is imported
    gc.disable()
    import torch.distributed  # noqa: F401  # also for scripts that only use torch

    if plan.kind is not Kind.DISTRIBUTED:
        import duoka.plain
        from duoka.private.torch import import_compiler

        import_compiler()  # the first optimizer of every worker would
    if plan.kind is Kind.API:
        import duoka.run  # noqa: F401
    gc.freeze()
    gc.enable()


def attempt(run: RunContext, number: int) -> Verdict:
    """Run all workers once, from the fork to the end of the last; report what ended them, and return it.

    Each attempt has its own status board, store and key prefix, so that no state reaches the next attempt.
    """
    plan, others = run.plan, run.others
    board = run.record.begin(number, plan.ranks)
    group = WorkerGroup(run.signals, others.channel)
    others.begin(number)
    store = None
    try:
        _check_files(plan.workers)
        shared_memory, store = _shared_files(plan)
        temporary = None
        with suppress(FileNotFoundError):  # no directory is writable
            # No longer than Python's own name: the path of a socket has at most 107 bytes.
            temporary = os.path.join(tempfile.gettempdir(), f"duoka-{secrets.token_urlsafe(5)}")
        # 64 bits, equal on all machines, which know the run by one name, and different in each attempt.
        entropy = random.Random(f"{run.run_id} {number}").getrandbits(64) if run.entropy is None else run.entropy
        group.start(
            Attempt(
                plan=plan,
                number=number,
                run_id=run.run_id,
                entropy=entropy,
                board=board,
                shared_memory=shared_memory,
                temporary=temporary,
                function=run.function,
                observer=run.observer,
                gloo=others.gloo,
                key=others.key,
                store=store,
            ),
            run.outputs,
        )
        run.record.started(group.pids)
        with (
            # After the workers, which must not inherit its pipe; before the store, whose server is a thread: after it
            # this process must not fork any more.
            orphan_reaper(group.pids, temporary, others.channel.close_files),
            _store(plan.machines, store) as port,
        ):
            others.start(group, port)
            stuck, asked = _watch(run, group, board)
            if asked is not None:
                others.announce_end(asked)
                _stop(group, asked, board)
            elif group.failed() or not group.gone():
                # First the notice: within milliseconds the ranks of other machines lose the connection, and their
                # commands must not take that for the cause.
                others.announce_end()
                group.end()
            rows = tuple(board.counters(rank).rows for rank in plan.ranks)
            verdict = replace(judge(group.workers, stuck, asked), saved=board.saved(), rows=rows)
            verdict = others.conclude(verdict, group)
        text = ""
        # If each command is one rank, the failed rank's or rank 0's reports the end.
        is_own = verdict.why not in ("elsewhere", "agreed", "stopped")
        if plan.machines.each == "machine" or plan.machines.number == 0 or is_own:
            text = report(verdict, ReportContext(plan, board, group.workers, run.outputs))
            run.write(text)
        if verdict.code and verdict.why != "stopped":
            run.record.failed(cause(verdict), text + other_stacks(verdict))
        return verdict
    finally:
        group.close()
        if store is not None:
            os.close(store)


def _watch(
    run: RunContext, group: WorkerGroup, board: StatusBoard
) -> tuple[hangs.Stuck | None, signal.Signals | None]:
    """Watch until all workers have ended, or it is time to end them.

    Returns the hang, if ranks are stuck, and the signal that asked the run to end.
    """
    plan, others = run.plan, run.others
    limits = hangs.Limits(plan.timeout, plan.step_timeout, wait_while_busy=plan.kind is Kind.DISTRIBUTED)
    idle_clock, debugged_until = hangs.IdleClock(), 0.0

    def hang() -> hangs.Stuck | None:
        if time.monotonic() <= debugged_until or others.is_debugging():
            return None
        return hangs.find_stuck(board, group.workers, limits, idle_clock, others.progress())

    while not group.gone():
        group.listen(TICK)
        others.share_samples(run.record, board)
        run.record.look()
        others.show(board, TO_SHOW, debugged=time.monotonic() < debugged_until)
        if group.signals.stops:
            return None, group.signals.stops[0]
        notice = others.announced_end()
        if notice:
            return None, signal.Signals(notice)
        if group.failed():
            others.announce_end()
        if notice is not None or (group.failed() and not agreed(group.workers)):
            others.show(board, last=True)
            # An error of the script itself ends all ranks in the same way, one after the other; and those that only
            # lost the connection to a rank say so. Both take a moment, as does the progress of other machines.
            grace = GRACE if notice is None else REMOTE_GRACE
            group.wait(lambda: group.done() and others.all_sent_last_progress(), grace)
            if notice is not None or not agreed(group.workers):
                return _missed(plan, group, board, others), None
        elif stuck := hang():
            if stuck.mismatch is not None:  # let the ranks end by themselves: their endings have their values
                group.end_waits()
                group.wait(group.done, TO_END)
            stuck = hangs.refine_with_stacks(hangs.collect_stacks(stuck, group), board)
            if not any(hangs.in_debugger(stuck.stacks.get(rank, "")) for rank in stuck.missing):
                return stuck, None
            debugged_until = time.monotonic() + TO_DEBUG  # until then no stacks are collected again
        elif hangs.waiting_for_ended(board, group.workers):
            return None, None  # no limit: nobody can join it any more
        elif group.done() and (stuck := hangs.find_not_exiting(group.workers, limits, idle_clock)):
            return hangs.collect_stacks(stuck, group), None
    return None, None


def _missed(plan: Plan, group: WorkerGroup, board: StatusBoard, others: OtherMachines) -> hangs.Stuck | None:
    """Return the hang that ranks themselves noticed: others did not join, or called another collective."""
    failed = [worker for worker in group.workers if worker.failed]
    if not failed or not all(is_consequence(worker) or is_abort(worker) for worker in failed):
        return None
    aborted = any(is_abort(worker) and board.read(worker.rank).waiting for worker in failed)
    # A library's own limit has passed already; otherwise only different collectives count, for which no limit holds.
    limits = hangs.Limits(0.0 if aborted or any(map(was_too_late, failed)) else NEVER)
    stuck = hangs.find_stuck(board, group.workers, limits, hangs.IdleClock(), others.progress())
    if stuck is None or (aborted and not (stuck.missing or stuck.mismatch)):
        return None
    limit = 0.0 if plan.kind is Kind.DISTRIBUTED else plan.timeout
    return hangs.refine_with_stacks(hangs.collect_stacks(replace(stuck, limit=limit), group), board)


def _stop(group: WorkerGroup, asked: signal.Signals, board: StatusBoard) -> None:
    """Forward a request to end to the scripts and wait until they have ended; a second Ctrl-C kills them.

    A rank that waits in torch for one that has ended cannot answer a signal, and is not waited for.
    """
    pressed = int(asked is signal.SIGINT)  # a second one may have arrived already

    def is_over() -> bool:
        left = [worker for worker in group.workers if not worker.done]
        cannot_answer = left == hangs.waiting_for_ended(board, group.workers) != []
        return group.gone() or group.signals.interrupts > pressed or cannot_answer

    if asked is signal.SIGINT:
        board.interrupt()
    group.signal(asked)
    for _ in range(TO_STOP[asked]):
        if group.wait(is_over, 1.0):
            break
        group.wake()  # a main thread that sleeps, while the kernel has given the signal to another one
    if group.signals.interrupts > pressed:
        group.kill()
    else:
        group.end()


def _shared_files(plan: Plan) -> tuple[mmap.mmap | None, int | None]:
    """Create shared memory for small CPU tensors, and an unnamed file as the store, which no other user can open.

    Both only if duoka does the communication, and there is one machine; else the store needs a port. Returns the
    descriptor of the store.
    """
    if plan.kind is Kind.DISTRIBUTED or plan.machines.count > 1:
        return None, None
    from duoka.collectives.shared_memory import LARGE_SLOT, is_possible, memory_size

    memory = mmap.mmap(-1, memory_size(plan.workers, LARGE_SLOT)) if is_possible() else None
    # torch's FileStore opens a path, which an unnamed file has below /proc only.
    return memory, os.memfd_create("duoka-store") if os.path.isdir("/proc/self/fd") else None


def _check_files(workers: int) -> None:
    """Raise WorkerFailed if this process may not open enough files: torch's store would abort it."""
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
def _store(machines: Machines, unnamed: int | None) -> Iterator[int]:
    """Run a store for the workers of all machines on a free port, and yield the port; 0 if there is none here."""
    from duoka.network.rendezvous import tcp_store

    if machines.number > 0 or unnamed is not None:  # machine 0 has it, or it is this file
        yield 0
        return
    host = environment.LOOPBACK if machines.count == 1 else machines.host
    listener = listen_on(host, 0)  # torch's own would listen on all networks
    port, limit = listener.getsockname()[1], timedelta(seconds=60)
    file = listener.detach()
    store = tcp_store(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=file)
    try:
        with names_from_files():  # its thread looks up the name of each client
            yield port
    finally:
        del store
