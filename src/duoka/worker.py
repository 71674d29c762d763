"""One worker's life, from the fork to its exit code. To be read top to bottom."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from duoka import debugging, ending, environment, loader_deaths, traces
from duoka.board import Board
from duoka.board import Seat as BoardSeat
from duoka.ending import Ending
from duoka.environment import Place
from duoka.keys import Key
from duoka.libc import flush_c_streams
from duoka.lines import Lines
from duoka.plan import Device, Kind, Plan
from duoka.private.python import (
    forget_exit_functions,
    join_threads,
    keep_from_exit,
    put_sockets_into,
    run_exit_functions,
)
from duoka.target import run_target

if TYPE_CHECKING:
    from duoka.view.collectives import Seat

UNWRITTEN = 120  # python's exit code where standard output cannot be written out at the end
A_DAY = 24 * 3600.0
STACKS_SIGNAL = signal.SIGRTMAX - 3  # none of those that scripts, schedulers and profilers use


class Observer(Protocol):
    """What accompanies the script in every worker and leaves its numbers alone (`duoka.trials`)."""

    def begin(self, rank: int) -> None:
        """Before anything is installed for the script."""

    def around(self, seat: BoardSeat) -> AbstractContextManager[None]:
        """Around the script, when all is installed. seat: where this rank is, and how far."""


class Unobserved:
    """No observer."""

    def begin(self, rank: int) -> None:
        """Nothing."""

    def around(self, seat: BoardSeat) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Attempt:
    """What all workers of one attempt have in common.

    number: 0 at first, and one more each time the run is started again.
    entropy: a random number of 64 bits.
    exchange: memory through which the ranks hand each other small tensors; None: they have gloo only.
    key: of the run. store: the file without a name in which the ranks of one machine meet; None: a port.
    gloo: the network device over which gloo talks; None: it finds one.
    temporary: a directory for the sockets that multiprocessing makes, as for a loader's workers. The workers make it,
        once somebody is there to remove it (`duoka.launchers.heir`). None: it makes its own.
    function: what they run instead of the plan's script. observer: what accompanies it.
    """

    number: int
    run_id: str
    entropy: int
    board: Board
    exchange: mmap.mmap | None
    temporary: str | None = None
    function: Callable[[], object] | None = None
    observer: Observer = field(default_factory=Unobserved)
    gloo: str | None = "lo"
    key: Key = field(default_factory=Key)
    store: int | None = None


@dataclass(frozen=True, slots=True)
class Post:
    """What the command process hands to a worker by forking it.

    rank: among those of all machines.
    own_log: standard output and error are this rank's log file, not the terminal.
    """

    rank: int
    attempt: Attempt
    own_log: bool


def live(plan: Plan, post: Post, wire: socket.socket, stacks: int) -> int:
    """Live a worker's life, and return its exit code.

    Args:
        plan: what the run does.
        post: what tells this worker from the others.
        wire: the store's port comes in here, and how the script ended goes out.
        stacks: a file for the stacks of all threads, written when STACKS_SIGNAL comes, or in a crash.
    """
    _tell_stacks(stacks)
    if post.attempt.function is not None:
        forget_exit_functions()  # of the program that it was forked from, whose end this is not
    environment.hide_key()
    environment.show_cards([_device(plan, post.rank)] if plan.kind is not Kind.DISTRIBUTED else plan.devices)
    shared = post.attempt
    if shared.gloo is not None:
        environment.lead_gloo(shared.gloo)
    set_threads(plan.threads)
    environment.keep_freed_memory()
    place = _place(plan, post, _port(wire))
    _put_sockets_into(shared.temporary)
    loader_deaths.spare_temporary_files()
    loader_deaths.forgive_lost_ranks()

    shared.observer.begin(post.rank)
    _count_steps(post.attempt.board.seat(post.rank))
    _show_checkpoints(post.attempt.board.seat(post.rank))
    if plan.world_size > 1:
        debugging.refuse(plan.kind, plan.world_size, post.rank)
    plan = _with_patience(plan)
    by_itself = plan.self_launching or (plan.kind is Kind.PLAIN and plan.strategy == "single")
    run = _run_script if by_itself else LIVES[plan.kind]
    home = os.getpid()
    end = _watched(run, plan, place, post)
    if os.getpid() != home:  # a process that the script forked has come to the script's end: nothing of this rank's
        if not (post.own_log or end.shown):
            _write(end.trace or (end.said and f"{end.said}\n"))
        return _leave(end.code)[0]

    with suppress(OSError):  # there is nobody left to be told
        wire.sendall(end.line())
    code, raised = _leave(end.code)
    if raised:
        with suppress(OSError):
            wire.sendall(json.dumps("".join(raised)).encode() + b"\n")
    return code


def _device(plan: Plan, rank: int) -> Device:
    return plan.devices[rank - plan.ranks.start]


def _place(plan: Plan, post: Post, port: int) -> Place:
    """Where this worker is among all. port: of the store, on machine 0."""
    shared, machines = post.attempt, plan.machines
    place = Place(post.rank, plan.world_size, shared.number, port, shared.run_id, plan.restarts, file=shared.store)
    if machines.count == 1:
        return place
    local, here, host, hosts = machines.beside(plan.workers)
    first = plan.ranks.start - local
    return replace(place, host=machines.host, machine=host, machines=hosts, first=first, here=here)


def _with_patience(plan: Plan) -> Plan:
    """Whoever watches the board ends a wait in time, or lets it go on while a rank is in a debugger.

    Of what a GPU waits for the board knows nothing, and a script that is left alone chooses for itself.
    """
    if plan.kind is Kind.DISTRIBUTED or plan.devices[0].type != "cpu":
        return plan
    return replace(plan, timeout=max(plan.timeout, A_DAY))


def _put_sockets_into(folder: str | None) -> None:
    """multiprocessing removes a directory of its own at the end of python, which a worker may not live to see."""
    if folder is not None:
        with suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            put_sockets_into(folder)


def _tell_stacks(file: int) -> None:
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=file)


def _count_steps(seat: BoardSeat) -> None:
    """Show on the board how many steps are done: of the optimizer that has made most."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from duoka.view.handles import unnumbered

    steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    most = 0

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal most
        number = steps[optimizer] = steps.get(optimizer, 0) + 1
        if number > most:
            most = number
            seat.step(number)

    with unnumbered():
        register_optimizer_step_post_hook(count)


def _show_checkpoints(seat: BoardSeat) -> None:
    """Show on the board of which step the newest checkpoint is."""
    from duoka.process import this_process

    this_process.cache_clear()  # a parent that called `duoka.launch` had one of its own
    this_process().saved = seat.saved


def set_threads(count: int | None) -> None:
    """Let torch compute with so many threads; None leaves it to torch."""
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _port(wire: socket.socket) -> int:
    """Wait for the store's port, which the command process sends when all workers are forked."""
    with wire.makefile("rb", buffering=0) as stream:
        line = stream.readline()
    return int(line) if line else sys.exit(1)  # its end without a word: the command process is gone


def _run_script(plan: Plan, place: Place, post: Post) -> None:
    with post.attempt.observer.around(post.attempt.board.seat(post.rank)):
        run_target(plan.target)


def _run_plain(plan: Plan, place: Place, post: Post) -> None:
    from duoka.plain import meet, run_plain
    from duoka.plain.chance import Chance
    from duoka.rendezvous import reach_store

    environment.hide_ranks()
    environment.hide_tasks()
    environment.leave_wandb_to_rank_0(place.rank)
    shared, seat = post.attempt, post.attempt.board.seat(place.rank)
    script = partial(_run_script, plan, place, post)
    if plan.world_size == 1:
        run_plain_alone(plan, shared.entropy, script)
        return
    environment.seed_hashes(shared.entropy)
    reach = partial(reach_store, place, plan.timeout)
    ranks = meet(plan, place.rank, reach(), seat, shared.exchange, shared.key)
    with _saying(plan, place.rank) as say:
        run_plain(plan, ranks, Chance(shared.entropy, reach, shared.key), say, script)


def run_plain_alone(plan: Plan, entropy: int, script: Callable[[], None]) -> None:
    """A plain script with the interceptions of several ranks, as the only worker of `plan`."""
    from duoka.plain import run_plain
    from duoka.plain.chance import Chance
    from duoka.view.alone import OneRank

    with _saying(plan, 0) as say:
        run_plain(plan, OneRank(), Chance(entropy), say, script)


def _run_api(plan: Plan, place: Place, post: Post) -> None:
    from duoka.process import this_process

    environment.give_ranks(place)
    take_place(plan, place, post.attempt.board.seat(place.rank), post.attempt.exchange, post.attempt.key)
    with this_process().ending():
        (post.attempt.function or partial(_run_script, plan, place, post))()


def take_place(plan: Plan, place: Place, seat: Seat, exchange: mmap.mmap | None, key: Key) -> None:
    """Let `duoka.start` in this process find who it is."""
    from duoka.origins.forked import Asked, Forked
    from duoka.process import this_process

    device = _device(plan, place.rank)
    index = 0 if device.type == "cuda" else device.index  # the only one that this process sees
    given = device.type if index is None else f"{device.type}:{index}"
    asked = Asked(plan.batch_norm, plan.randomness, plan.loading, plan.timeout)
    asked = replace(asked, strategy=plan.strategy, shares=plan.shares, row_independent=plan.row_independent)
    ranks = place.rank, place.world_size, place.local_rank
    this_process().origin = Forked(*ranks, place, seat, exchange, given, asked, key)


def _run_distributed(plan: Plan, place: Place, post: Post) -> None:
    import torch

    from duoka.recorder import show_on
    from duoka.rendezvous import empty_store_for_each_group, keep_destroyed_groups
    from duoka.view.site import user_line

    environment.give_ranks(place)
    environment.record_flights()
    follower = show_on(post.attempt.board.seat(place.rank))
    empty_store_for_each_group(lambda: follower.comes(user_line()))
    keep_destroyed_groups()
    torch.default_generator.seed()  # under torchrun, too, every rank starts with random numbers of its own
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    try:
        with post.attempt.observer.around(post.attempt.board.seat(place.rank)):
            run_target(plan.target, local_rank_args(plan, place.local_rank))
    finally:
        follower.look()


LIVES = {Kind.PLAIN: _run_plain, Kind.API: _run_api, Kind.DISTRIBUTED: _run_distributed}


def local_rank_args(plan: Plan, rank: int) -> list[str]:
    """`--local_rank=N`, spelled as the script parses it, and in front as torch.distributed.launch has it."""
    flag = plan.local_rank_flag
    if flag is None or any(arg.partition("=")[0] == flag for arg in plan.target.args):
        return []
    return [f"{flag}={rank}"]


@contextmanager
def _saying(plan: Plan, rank: int) -> Iterator[Callable[[str], None]]:
    """What shows a line of the header while the script runs: on rank 0, and not if it shall be quiet."""
    if plan.verbosity == "quiet" or rank:
        yield lambda text: None
        return
    with Lines() as lines:
        yield lines.say


def _watched(run: Callable[[Plan, Place, Post], None], plan: Plan, place: Place, post: Post) -> Ending:
    """Run the script, and put into words how it ended."""
    try:
        run(plan, place, post)
    except SystemExit as error:
        end = ending.exited(place.rank, error)
        if end.said and post.own_log:
            _write(f"{end.said}\n")
        return end
    except BaseException as raised:
        loader_deaths.hush()
        told = loader_deaths.told(raised)
        end = ending.raised(place.rank, told)
        return end if post.attempt.function is not None else _show(told, end, post.own_log)
    return ending.returned(place.rank)


def _show(error: BaseException, end: Ending, own_log: bool) -> Ending:
    """Show an error where this rank's own eyes are: its log, and the script's sys.excepthook.

    On the terminal the command process shows one error for all.
    """
    hook = _own_excepthook()
    if hook is not None and not end.consequence:
        _call(lambda: hook(type(error), error, error.__traceback__))
        return replace(end, shown=not own_log)
    if own_log:
        _write(end.trace)
    return end


def _write(text: str) -> None:
    """Write to this rank's log; where its disk is full, the command process still tells it."""
    with suppress(OSError, ValueError):
        print(text, end="", file=sys.stderr, flush=True)


def _own_excepthook() -> Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None:
    """The script's own sys.excepthook, if it set one; torch sets one, too, which only marks the lines."""
    hook = sys.excepthook
    if hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith("torch."):
        return None
    return hook


def _leave(code: int) -> tuple[int, list[str]]:
    """What the interpreter does before it ends: threads, atexit functions, streams.

    Returns the exit code, and the tracebacks of what atexit functions raised, which python shows and forgives.
    The rest of its end is left out: nothing of it can be seen, and tearing down torch and CUDA takes time.
    """
    _call(join_threads)  # as multiprocessing does for its children
    _call(_leave_operators)
    raised: list[str] = []
    show = sys.unraisablehook

    def show_and_note(seen: Any) -> None:
        show(seen)
        if seen.exc_value is not None:
            traces.trim(seen.exc_value)
            raised.append(traces.shown(seen.exc_value))

    sys.unraisablehook = show_and_note
    _call(run_exit_functions)
    with suppress(Exception):
        sys.stderr.flush()
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except Exception as error:
        with suppress(Exception):
            said = f"Exception ignored in: {sys.stdout!r}\n{traces.headline(error)}"
            print(said, file=sys.stderr, flush=True)
        code = UNWRITTEN
    flush_c_streams()
    return code, raised


def _leave_operators() -> None:
    """Let torch not take down its operators at exit, which nobody sees and everybody waits for: 0.1 s and more."""
    if "torch" in sys.modules:
        from duoka.private.torch import TAKE_DOWN

        keep_from_exit(getattr(*TAKE_DOWN))


def _call(function: Callable[[], object]) -> None:
    """Call what may raise at a moment when nobody is left to catch it; python, too, shows it and goes on."""
    try:
        function()
    except BaseException as error:
        with suppress(Exception):
            print(traces.shown(error), end="", file=sys.stderr, flush=True)
