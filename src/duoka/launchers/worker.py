"""One worker process, from the fork to its exit code. To be read top to bottom."""

from __future__ import annotations

import faulthandler
import gc
import json
import mmap
import multiprocessing
import os
import re
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from duoka.hardware.gpu import Device
from duoka.hardware.vendors import variables_for
from duoka.launchers.hints import MEMORY
from duoka.launchers.processes import interrupt_loader_workers
from duoka.network.keys import Key
from duoka.origins.process import this_process
from duoka.planning.plan import Kind, Plan
from duoka.private.python import (
    forget_exit_functions,
    join_threads,
    run_exit_functions,
    set_socket_folder,
    skip_at_exit,
)
from duoka.publishing import publish
from duoka.script.target import run_target
from duoka.supervision import ending, script_errors, tracebacks
from duoka.supervision.ending import Ending
from duoka.supervision.interruption import Interruption
from duoka.supervision.status_board import StatusBoard, StatusSlot
from duoka.system import environment
from duoka.system.environment import RankInfo
from duoka.system.libc import flush_c_streams
from duoka.system.messages import Lines

if TYPE_CHECKING:
    from duoka.origins.origin import Forked
UNWRITTEN = 120  # Python's exit code if standard output cannot be flushed at the end
A_DAY = 24 * 3600.0
STACKS_SIGNAL = signal.SIGRTMAX - 3  # a signal that scripts, schedulers and profilers do not use


class Observer:
    """Observes the script in every worker, without changing its numbers (`duoka.trials`). This one does nothing."""

    def begin(self) -> None:
        """Start observing, before interceptions are installed."""

    def around(self, slot: StatusSlot) -> AbstractContextManager[None]:
        """Within the context, observe the script; interceptions are installed. slot: the status of this rank."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Attempt:
    """Settings and resources of one attempt, which all of its workers inherit."""

    plan: Plan
    number: int  # 0 at first, and one more after each restart
    run_id: str
    entropy: int  # 64 random bits
    board: StatusBoard
    shared_memory: mmap.mmap | None = None  # for small tensors; None: gloo only
    # A folder for multiprocessing's sockets, which the workers create and the command removes; None: its own choice.
    temporary: str | None = None
    function: Callable[[], object] | None = None  # runs instead of the plan's script
    observer: Observer = field(default_factory=Observer)
    gloo: str | None = "lo"  # the network interface for gloo; None: gloo chooses
    key: Key = field(default_factory=Key)  # of the run
    store: int | None = None  # descriptor of the unnamed file that is the store; None: the store is at a port

    def device(self, rank: int) -> Device:
        """Return the device of a rank of this machine."""
        return self.plan.devices[rank - self.plan.ranks.start]

    def rank_info(self, rank: int, port: int = 0) -> RankInfo:
        """Return a worker's rank, and what it needs to find the others. port: of the store, on machine 0."""
        plan = self.plan
        info = RankInfo(rank, plan.world_size, self.number, port, self.run_id, plan.restarts, file=self.store)
        if plan.machines.count == 1:
            return info
        local, here, machine, machines = plan.machines.beside(plan.workers)
        first = plan.ranks.start - local
        return replace(info, host=plan.machines.host, machine=machine, machines=machines, first=first, here=here)

    def origin(self, info: RankInfo) -> Forked:
        """Return what `duoka.start` reads in a worker: rank, device, connections and settings."""
        from duoka.origins.origin import Forked

        device, slot = self.device(info.rank), self.board.slot(info.rank)
        name = device.type if device.index is None else f"{device.type}:0"  # the only one that this process sees
        ranks = info.rank, info.world_size, info.local_rank
        return Forked(*ranks, self.plan, info, slot, self.shared_memory, name, self.key)


def run_worker(attempt: Attempt, rank: int, own_log: bool, pipe: socket.socket, stacks: int) -> int:
    """Run the script in this worker process, and return its exit code.

    own_log: standard output and error are this rank's log file, not the terminal. pipe: a socket to the command
    process, which sends the store's port; the worker sends how the script ended. stacks: descriptor for stack dumps.
    """
    plan = attempt.plan
    # Its handler is in C: it writes the stacks also while a thread holds the interpreter's lock for minutes.
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    if not faulthandler.is_enabled():  # else the user has chosen where crashes are shown, as by -X faulthandler
        faulthandler.enable(file=stacks)
    if attempt.function is not None:
        forget_exit_functions()  # those of the calling program
    environment.unset(["DUOKA_KEY"])  # a script and its child processes do not need it
    environment.set_variables(
        variables_for(plan.devices if plan.kind is Kind.DISTRIBUTED else [attempt.device(rank)])
    )
    if attempt.gloo is not None:
        environment.set_gloo_device(attempt.gloo)
    set_threads(plan.threads)
    environment.keep_freed_memory()
    with pipe.makefile("rb", buffering=0) as stream:
        port = stream.readline()  # of the store, which the command process sends when all workers are forked
    if not port:
        sys.exit(1)  # the command process is gone
    info = attempt.rank_info(rank, int(port))
    if attempt.temporary is not None:
        with suppress(OSError):  # multiprocessing's own directory would remain if the worker is killed
            os.makedirs(attempt.temporary, mode=0o700, exist_ok=True)
            set_socket_folder(attempt.temporary)
    # Python 3.12 warns of any threads; those of gloo and of duoka are not the script's, and allow a fork.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    script_errors.keep_loader_errors()
    script_errors.hide_lost_rank_errors()

    attempt.observer.begin()
    publisher = publish(attempt.board, rank, shows_script=rank == 0)
    this_process.cache_clear()  # the parent's, if it called `duoka.launch`
    this_process().saved = publisher.slot.saved  # the step of the newest checkpoint, on the status board
    publisher.join(this_process())
    if plan.world_size > 1:
        script_errors.refuse_debuggers(plan.kind, plan.world_size, rank)
    if plan.world_size > 1 and plan.machines.count == 1 and plan.kind is not Kind.DISTRIBUTED:
        attempt.board.interruption = Interruption(attempt.board, rank)
        attempt.board.interruption.install()
    home = os.getpid()
    end = _ending_of(replace(attempt, plan=_with_long_timeout(plan)), info, own_log)
    if os.getpid() != home:  # a process forked by the script has reached the script's end: it reports nothing
        if not (own_log or end.shown):
            _print(end.trace or (end.said and f"{end.said}\n"))
        return _shut_down(end.code)[0]

    # Before connections are closed: the other ranks' errors about that must not come first.
    with suppress(OSError):  # the command process is gone
        pipe.sendall(end.line())
    code, raised = _shut_down(end.code)
    if raised:
        with suppress(OSError):
            pipe.sendall(json.dumps("".join(raised)).encode() + b"\n")
    return code


# Before the script.


def set_threads(count: int | None) -> None:
    """Set torch's number of threads; None keeps it."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _with_long_timeout(plan: Plan) -> Plan:
    """Lengthen the timeout of collectives: the command process ends waits, unless a rank is in a debugger."""
    if plan.kind is Kind.DISTRIBUTED:  # the script sets its own
        return plan
    # On GPUs by a minute only: their libraries end the process, without a report.
    return replace(plan, timeout=max(plan.timeout, A_DAY) if plan.devices[0].type == "cpu" else plan.timeout + 60.0)


# The script, by its kind.


def _run(attempt: Attempt, info: RankInfo) -> None:
    plan = attempt.plan
    script = partial(_run_script, attempt, info)
    if plan.self_launching or (plan.kind is Kind.PLAIN and plan.strategy == "single"):
        script()  # the only worker, in a child process as it may be restarted
    elif plan.kind is Kind.PLAIN:
        _run_plain(attempt, info, script)
    elif plan.kind is Kind.API:
        environment.set_rank_variables(info)
        this_process().origin = attempt.origin(info)
        with this_process().ending():
            (attempt.function or script)()
    else:
        _run_distributed(attempt, info)


def _run_script(attempt: Attempt, info: RankInfo, first_args: tuple[str, ...] = ()) -> None:
    with attempt.observer.around(attempt.board.slot(info.rank)):
        run_target(attempt.plan.target, first_args)


def _run_plain(attempt: Attempt, info: RankInfo, script: Callable[[], None]) -> None:
    from duoka.network.rendezvous import reach_store
    from duoka.plain import run_plain
    from duoka.plain.shared_random import SharedRandom

    plan = attempt.plan
    environment.unset(environment.RANKS)  # a plain script sees none
    environment.unset(environment.TASKS)  # which libraries would take for their own ranks
    environment.disable_wandb_except_on_rank_0(info.rank)
    if plan.world_size == 1:
        run_plain_alone(attempt, script)
        return
    environment.set_default("PYTHONHASHSEED", str(attempt.entropy % 2**32))  # of programs that ranks start
    reach = partial(reach_store, info, plan.timeout)
    ranks = attempt.origin(info).connect(plan.timeout).collectives(info.rank, plan.world_size, plan.timeout, 0)
    with _messages(plan, info.rank) as say:
        run_plain(plan, ranks, SharedRandom(attempt.entropy, reach, attempt.key), say, script)


def run_plain_alone(attempt: Attempt, script: Callable[[], None]) -> None:
    """Run a plain script with the interceptions of several ranks, as the only worker."""
    from duoka.collectives.base import OneRank
    from duoka.plain import run_plain
    from duoka.plain.shared_random import SharedRandom

    with _messages(attempt.plan, 0) as say:
        run_plain(attempt.plan, OneRank(), SharedRandom(attempt.entropy), say, script)


@contextmanager
def _messages(plan: Plan, rank: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints lines while the script runs: on rank 0, unless --quiet."""
    if plan.verbosity == "quiet" or rank:
        yield lambda text: None
        return
    with Lines() as lines:
        yield lines.say


def _run_distributed(attempt: Attempt, info: RankInfo) -> None:
    import torch

    from duoka.network.rendezvous import empty_store_for_each_group, keep_destroyed_groups
    from duoka.supervision.flight_recorder import follow_recorder
    from duoka.system.user_code import user_line

    environment.set_rank_variables(info)
    environment.set_default("TORCH_FR_BUFFER_SIZE", "256")  # for gloo, too; reading an entry takes 30 us with the GIL
    follower = follow_recorder(attempt.board.slot(info.rank))
    empty_store_for_each_group(lambda: follower.begin_group(user_line()))
    keep_destroyed_groups()
    torch.default_generator.seed()  # each rank has other random numbers, as under torchrun
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    try:
        _run_script(attempt, info, local_rank_args(attempt.plan, info.local_rank))
    finally:
        follower.look()


def local_rank_args(plan: Plan, rank: int) -> tuple[str, ...]:
    """Return `--local_rank=N`, spelled as the script parses it, unless it was given already."""
    flag = plan.local_rank_flag
    if flag is None or any(arg.partition("=")[0] == flag for arg in plan.target.args):
        return ()
    return (f"{flag}={rank}",)


# After the script.


def _ending_of(attempt: Attempt, info: RankInfo, own_log: bool) -> Ending:
    try:
        try:
            _run(attempt, info)
        finally:
            if attempt.board.interruption is not None:
                attempt.board.interruption.finish()
        if "torch" in sys.modules and (module := _accelerator()):
            module.synchronize()  # an error of a kernel that still runs is raised here, or nowhere
    except SystemExit as error:
        end = ending.exited(error)
        if end.said and own_log:
            _print(f"{end.said}\n")
        return end
    except BaseException as raised:
        script_errors.disable_loader_errors()  # one may be raised at any line from here on
        cause = script_errors.cause_of(raised)
        end = ending.raised(cause)
        end = replace(end, held=held_when_short(end.error))
        return end if attempt.function is not None else _show(cause, end, own_log)
    return Ending("returned", 0)


def _accelerator() -> Any:
    """Return torch's module of the accelerator that the script has used, if any. torch must be imported."""
    from duoka.hardware import accelerator

    return accelerator.in_use()


def held_when_short(error: str) -> list[int]:
    """Return what this rank's device held (`Ending.held`) when memory ran out; empty if an error tells of another."""
    if not re.search(MEMORY, error) or "torch" not in sys.modules:
        return []
    from torch.optim import Optimizer

    from duoka.strategies.balancing import model_bytes

    optimizers = [entry for entry in gc.get_objects() if issubclass(type(entry), Optimizer)]
    module = _accelerator()
    return [*model_bytes(optimizers), module.memory_allocated() if module else 0]


def _show(error: BaseException, end: Ending, own_log: bool) -> Ending:
    """Print an error to this rank's log, or by the script's own sys.excepthook.

    On the terminal the command process prints one error for all ranks.
    """
    hook = sys.excepthook
    is_scripts = hook is not sys.__excepthook__ and not getattr(hook, "__module__", "").startswith("torch.")
    if is_scripts and not end.consequence:  # torch's hook only marks the lines
        _call_safely(lambda: hook(type(error), error, error.__traceback__))
        return replace(end, shown=not own_log)
    if own_log:
        _print(end.trace)
    return end


def _print(text: str) -> None:
    """Print to this rank's log; if its disk is full, the command process still reports the error."""
    with suppress(OSError, ValueError):
        print(text, end="", file=sys.stderr, flush=True)


def _shut_down(code: int) -> tuple[int, list[str]]:
    """Do what the interpreter does before it exits: join threads, call atexit functions, flush streams.

    Returns the exit code, and the tracebacks of atexit functions that raised, which Python prints and ignores.
    Tearing down modules, torch and the GPU is left out: it takes time without effect.
    """
    _call_safely(join_threads)  # first, as the interpreter does: they may use what atexit functions close
    _call_safely(_end_loader_workers)
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
        if sys.stdout is not None and not _is_closed(sys.stdout):
            sys.stdout.flush()
    except Exception as error:
        with suppress(Exception):
            said = f"Exception ignored in: {sys.stdout!r}\n{tracebacks.headline(error)}"
            print(said, file=sys.stderr, flush=True)
        code = UNWRITTEN
    flush_c_streams()
    return code, raised


def _is_closed(stream: Any) -> bool:
    """Return whether a stream says so; an object that a script has put in its place need not."""
    try:
        return bool(stream.closed)
    except Exception:
        return False


def _end_loader_workers() -> None:
    if "torch.utils.data" in sys.modules and multiprocessing.active_children():
        interrupt_loader_workers([os.getpid()])  # multiprocessing's atexit function would end them by SIGTERM


def _keep_operators() -> None:
    if "torch" in sys.modules:
        from duoka.private.torch import TAKE_DOWN

        skip_at_exit(getattr(*TAKE_DOWN))  # which takes 0.1 s and more without effect


def _call_safely(function: Callable[[], object]) -> None:
    """Call a function, and print an exception of it, as Python does at exit."""
    try:
        function()
    except BaseException as error:
        with suppress(Exception):
            print(tracebacks.shown(error), end="", file=sys.stderr, flush=True)
