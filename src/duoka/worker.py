"""One worker process, from the fork to its exit code. To be read top to bottom."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from duoka import environment
from duoka.devices.vendors import variables_for
from duoka.environment import RankInfo
from duoka.network.keys import Key
from duoka.plan import Device, Kind, Plan
from duoka.private.python import (
    forget_exit_functions,
    join_threads,
    run_exit_functions,
    set_socket_folder,
    skip_at_exit,
)
from duoka.process import this_process
from duoka.publishing.publisher import publish
from duoka.supervision import debugging, ending, loader_deaths, tracebacks
from duoka.supervision.ending import Ending
from duoka.supervision.status_board import StatusBoard, StatusSlot
from duoka.system.libc import flush_c_streams
from duoka.system.messages import Lines
from duoka.target import run_target

if TYPE_CHECKING:
    from duoka.origins.forked import Forked
    from duoka.view.collectives.base import CollectiveSlot

UNWRITTEN = 120  # Python's exit code if standard output cannot be flushed at the end
A_DAY = 24 * 3600.0
STACKS_SIGNAL = signal.SIGRTMAX - 3  # a signal that scripts, schedulers and profilers do not use


class Observer(Protocol):
    """Observes the script in every worker without changing its numbers (`duoka.trials`)."""

    def begin(self, rank: int) -> None:
        """Start observing, before interceptions are installed."""

    def around(self, slot: StatusSlot) -> AbstractContextManager[None]:
        """Within the context, observe the script; interceptions are installed. slot: the status of this rank."""


class NullObserver:
    """Observes nothing."""

    def begin(self, rank: int) -> None:
        """Do nothing."""

    def around(self, slot: StatusSlot) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Attempt:
    """Settings and resources that all workers of one attempt share.

    number: 0 at first, and one more after each restart.
    entropy: 64 random bits.
    exchange: shared memory for small tensors; None: gloo only.
    key: of the run. store: descriptor of the unnamed file that is the store; None: the store is at a port.
    gloo: the network interface for gloo; None: gloo chooses.
    temporary: path of a directory for multiprocessing's sockets, which the workers create and
    `duoka.launchers.processes`
        removes; None: multiprocessing chooses.
    function: runs instead of the plan's script. observer: observes the script.
    """

    number: int
    run_id: str
    entropy: int
    board: StatusBoard
    exchange: mmap.mmap | None
    temporary: str | None = None
    function: Callable[[], object] | None = None
    observer: Observer = field(default_factory=NullObserver)
    gloo: str | None = "lo"
    key: Key = field(default_factory=Key)
    store: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerArguments:
    """The arguments of one worker.

    rank: among the workers of all machines.
    own_log: standard output and error are this rank's log file, not the terminal.
    """

    rank: int
    attempt: Attempt
    own_log: bool


def run_worker(plan: Plan, arguments: WorkerArguments, pipe: socket.socket, stacks: int) -> int:
    """Run the script in this worker process, and return its exit code.

    Args:
        plan: settings of the run.
        arguments: of this worker.
        pipe: socket to the command process, which sends the store's port; the worker sends how the script ended.
        stacks: file descriptor for stack dumps, written on STACKS_SIGNAL or in a crash.
    """
    _register_stack_dumps(stacks)
    if arguments.attempt.function is not None:
        forget_exit_functions()  # those of the calling program
    environment.unset_key()
    seen = [_device(plan, arguments.rank)] if plan.kind is not Kind.DISTRIBUTED else plan.devices
    environment.set_variables(variables_for(seen))
    shared = arguments.attempt
    if shared.gloo is not None:
        environment.set_gloo_device(shared.gloo)
    set_threads(plan.threads)
    environment.keep_freed_memory()
    info = _rank_info(plan, arguments, _port(pipe))
    _share_socket_directory(shared.temporary)
    # Python 3.12 warns of any threads; those of gloo and of duoka are not the script's, and allow a fork.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    loader_deaths.keep_errors()
    loader_deaths.hide_lost_rank_errors()

    shared.observer.begin(arguments.rank)
    publisher = publish(shared.board, arguments.rank, shows_script=arguments.rank == 0)
    _show_checkpoints(shared.board.slot(arguments.rank))
    publisher.join(this_process())
    if plan.world_size > 1:
        debugging.refuse(plan.kind, plan.world_size, arguments.rank)
    plan = _with_long_timeout(plan)
    by_itself = plan.self_launching or (plan.kind is Kind.PLAIN and plan.strategy == "single")
    run = _run_script if by_itself else RUNNERS[plan.kind]
    home = os.getpid()
    end = _run_and_record(run, plan, info, arguments)
    if os.getpid() != home:  # a process forked by the script has reached the script's end: it reports nothing
        if not (arguments.own_log or end.shown):
            _print(end.trace or (end.said and f"{end.said}\n"))
        return _shut_down(end.code)[0]

    with suppress(OSError):  # the command process is gone
        pipe.sendall(end.line())
    code, raised = _shut_down(end.code)
    if raised:
        with suppress(OSError):
            pipe.sendall(json.dumps("".join(raised)).encode() + b"\n")
    return code


def _device(plan: Plan, rank: int) -> Device:
    return plan.devices[rank - plan.ranks.start]


def _rank_info(plan: Plan, arguments: WorkerArguments, port: int) -> RankInfo:
    """Return this worker's rank, and what it needs to find the others. port: of the store, on machine 0."""
    shared, machines = arguments.attempt, plan.machines
    info = RankInfo(
        arguments.rank, plan.world_size, shared.number, port, shared.run_id, plan.restarts, file=shared.store
    )
    if machines.count == 1:
        return info
    local, here, host, hosts = machines.beside(plan.workers)
    first = plan.ranks.start - local
    return replace(info, host=machines.host, machine=host, machines=hosts, first=first, here=here)


def _with_long_timeout(plan: Plan) -> Plan:
    """Lengthen the timeout of collectives: the command process, which watches the status board, ends waits.

    It does not while a rank is in a debugger. On GPUs, whose libraries end the process without a report, the timeout
    is only a minute longer. Scripts with their own torch.distributed set their own.
    """
    if plan.kind is Kind.DISTRIBUTED:
        return plan
    return replace(plan, timeout=max(plan.timeout, A_DAY) if plan.devices[0].type == "cpu" else plan.timeout + 60.0)


def _share_socket_directory(folder: str | None) -> None:
    """Set the directory of multiprocessing's sockets; its own one would remain if the worker is killed."""
    if folder is not None:
        with suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            set_socket_folder(folder)


def _register_stack_dumps(file: int) -> None:
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=file)


def _show_checkpoints(slot: StatusSlot) -> None:
    """Record the step of the newest checkpoint on the status board."""
    this_process.cache_clear()  # the parent's, if it called `duoka.launch`
    this_process().saved = slot.saved


def set_threads(count: int | None) -> None:
    """Set torch's number of threads; None keeps it."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _port(pipe: socket.socket) -> int:
    """Receive the store's port, which the command process sends when all workers are forked."""
    with pipe.makefile("rb", buffering=0) as stream:
        line = stream.readline()
    return int(line) if line else sys.exit(1)  # end of file: the command process is gone


def _run_script(plan: Plan, info: RankInfo, arguments: WorkerArguments) -> None:
    with arguments.attempt.observer.around(arguments.attempt.board.slot(arguments.rank)):
        run_target(plan.target)


def _run_plain(plan: Plan, info: RankInfo, arguments: WorkerArguments) -> None:
    from duoka.network.rendezvous import reach_store
    from duoka.plain import run_plain
    from duoka.plain.shared_random import SharedRandom

    environment.unset_rank_variables()
    environment.unset_task_variables()
    environment.disable_wandb_except_on_rank_0(info.rank)
    shared, slot = arguments.attempt, arguments.attempt.board.slot(info.rank)
    script = partial(_run_script, plan, info, arguments)
    if plan.world_size == 1:
        run_plain_alone(plan, shared.entropy, script)
        return
    environment.seed_hashes(shared.entropy)
    reach = partial(reach_store, info, plan.timeout)
    communication = _origin(plan, info, slot, shared.exchange, shared.key).connect(plan.timeout)
    ranks = communication.collectives(info.rank, plan.world_size, plan.timeout, 0)
    with _messages(plan, info.rank) as say:
        run_plain(plan, ranks, SharedRandom(shared.entropy, reach, shared.key), say, script)


def run_plain_alone(plan: Plan, entropy: int, script: Callable[[], None]) -> None:
    """Run a plain script with the interceptions of several ranks, as the only worker of `plan`."""
    from duoka.plain import run_plain
    from duoka.plain.shared_random import SharedRandom
    from duoka.view.collectives.one_rank import OneRank

    with _messages(plan, 0) as say:
        run_plain(plan, OneRank(), SharedRandom(entropy), say, script)


def _run_api(plan: Plan, info: RankInfo, arguments: WorkerArguments) -> None:
    environment.set_rank_variables(info)
    set_origin(plan, info, arguments.attempt.board.slot(info.rank), arguments.attempt.exchange, arguments.attempt.key)
    with this_process().ending():
        (arguments.attempt.function or partial(_run_script, plan, info, arguments))()


def set_origin(plan: Plan, info: RankInfo, slot: CollectiveSlot, exchange: mmap.mmap | None, key: Key) -> None:
    """Set what `duoka.start` in this process reads: rank, device, settings."""
    this_process().origin = _origin(plan, info, slot, exchange, key)


def _origin(plan: Plan, info: RankInfo, slot: CollectiveSlot, exchange: mmap.mmap | None, key: Key) -> Forked:
    from duoka.origins.forked import Forked, StartDefaults

    device = _device(plan, info.rank)
    given = device.type if device.index is None else f"{device.type}:0"  # the only one that this process sees
    defaults = StartDefaults(plan.batch_norm, plan.randomness, plan.loading, plan.timeout)
    defaults = replace(defaults, strategy=plan.strategy, shares=plan.shares, row_independent=plan.row_independent)
    defaults = replace(defaults, weights=plan.weights, measures_rows=plan.measures_rows)
    ranks = info.rank, info.world_size, info.local_rank
    return Forked(*ranks, info, slot, exchange, given, defaults, key, far=plan.machines.count > 1)


def _run_distributed(plan: Plan, info: RankInfo, arguments: WorkerArguments) -> None:
    import torch

    from duoka.network.rendezvous import empty_store_for_each_group, keep_destroyed_groups
    from duoka.supervision.flight_recorder import follow_recorder
    from duoka.view.support.user_code import user_line

    environment.set_rank_variables(info)
    environment.enable_flight_recorder()
    follower = follow_recorder(arguments.attempt.board.slot(info.rank))
    empty_store_for_each_group(lambda: follower.begin_group(user_line()))
    keep_destroyed_groups()
    torch.default_generator.seed()  # each rank has other random numbers, as under torchrun
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    try:
        with arguments.attempt.observer.around(arguments.attempt.board.slot(info.rank)):
            run_target(plan.target, local_rank_args(plan, info.local_rank))
    finally:
        follower.look()


RUNNERS = {Kind.PLAIN: _run_plain, Kind.API: _run_api, Kind.DISTRIBUTED: _run_distributed}


def local_rank_args(plan: Plan, rank: int) -> list[str]:
    """Return `--local_rank=N`, spelled as the script parses it, unless it was given already."""
    flag = plan.local_rank_flag
    if flag is None or any(arg.partition("=")[0] == flag for arg in plan.target.args):
        return []
    return [f"{flag}={rank}"]


@contextmanager
def _messages(plan: Plan, rank: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints lines while the script runs: on rank 0, unless --quiet."""
    if plan.verbosity == "quiet" or rank:
        yield lambda text: None
        return
    with Lines() as lines:
        yield lines.say


def _run_and_record(
    run: Callable[[Plan, RankInfo, WorkerArguments], None], plan: Plan, info: RankInfo, arguments: WorkerArguments
) -> Ending:
    """Run the script, and record how it ended."""
    try:
        run(plan, info, arguments)
        _wait_for_gpu()
    except SystemExit as error:
        end = ending.exited(info.rank, error)
        if end.said and arguments.own_log:
            _print(f"{end.said}\n")
        return end
    except BaseException as raised:
        loader_deaths.disable()
        cause = loader_deaths.cause_of(raised)
        end = ending.raised(info.rank, cause)
        return end if arguments.attempt.function is not None else _show(cause, end, arguments.own_log)
    return ending.returned(info.rank)


def _wait_for_gpu() -> None:
    """Wait for the kernels that still run: an error of theirs is raised here, or nowhere."""
    if "torch" in sys.modules:
        from duoka import accelerator

        if module := accelerator.in_use():
            module.synchronize()


def _show(error: BaseException, end: Ending, own_log: bool) -> Ending:
    """Print an error to this rank's log, or by the script's own sys.excepthook.

    On the terminal the command process prints one error for all ranks.
    """
    hook = _own_excepthook()
    if hook is not None and not end.consequence:
        _call_safely(lambda: hook(type(error), error, error.__traceback__))
        return replace(end, shown=not own_log)
    if own_log:
        _print(end.trace)
    return end


def _print(text: str) -> None:
    """Print to this rank's log; if its disk is full, the command process still reports the error."""
    with suppress(OSError, ValueError):
        print(text, end="", file=sys.stderr, flush=True)


def _own_excepthook() -> Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None:
    """Return the script's own sys.excepthook; None without one (torch's hook only marks the lines)."""
    hook = sys.excepthook
    if hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith("torch."):
        return None
    return hook


def _shut_down(code: int) -> tuple[int, list[str]]:
    """Do what the interpreter does before it exits: join threads, call atexit functions, flush streams.

    Returns the exit code, and the tracebacks of atexit functions that raised, which Python prints and ignores.
    Tearing down modules, torch and the GPU is left out: it takes time without effect.
    """
    _call_safely(join_threads)  # as multiprocessing does for its children
    _call_safely(_keep_operators)
    raised: list[str] = []
    show = sys.unraisablehook

    def show_and_note(seen: Any) -> None:
        show(seen)
        if seen.exc_value is not None:
            tracebacks.trim(seen.exc_value)
            raised.append(tracebacks.shown(seen.exc_value))

    sys.unraisablehook = show_and_note
    _call_safely(run_exit_functions)
    with suppress(Exception):
        sys.stderr.flush()
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except Exception as error:
        with suppress(Exception):
            said = f"Exception ignored in: {sys.stdout!r}\n{tracebacks.headline(error)}"
            print(said, file=sys.stderr, flush=True)
        code = UNWRITTEN
    flush_c_streams()
    return code, raised


def _keep_operators() -> None:
    """Let torch not unregister its operators at exit, which takes 0.1 s and more without effect."""
    if "torch" in sys.modules:
        from duoka.private.torch import TAKE_DOWN

        skip_at_exit(getattr(*TAKE_DOWN))


def _call_safely(function: Callable[[], object]) -> None:
    """Call a function, and print an exception of it, as Python does at exit."""
    try:
        function()
    except BaseException as error:
        with suppress(Exception):
            print(tracebacks.shown(error), end="", file=sys.stderr, flush=True)
