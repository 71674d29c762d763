"""One worker's life, from the fork to its exit code. To be read top to bottom."""

from __future__ import annotations

import atexit
import faulthandler
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

from duoka import environment, traces
from duoka.board import Board
from duoka.ending import Ending
from duoka.environment import Place
from duoka.errors import AskedError, PeerLost, TimedOut
from duoka.libc import flush_c_streams
from duoka.plan import Kind, Plan
from duoka.target import run_target

STACKS_SIGNAL = signal.SIGRTMAX - 3  # none of those that scripts, schedulers and profilers use

# What gloo and NCCL say when another rank went away or did not come, rather than of this rank's own fault.
NETWORK_NOISE = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "remote process exited",
    "socket timeout",
    "timed out waiting",
    "timeout caused pair closure",
)


@dataclass(frozen=True, slots=True)
class Post:
    """What the command process hands to a worker by forking it.

    own_log: standard output and error are this rank's log file, not the terminal.
    entropy: a number that all ranks share.
    """

    rank: int
    attempt: int
    run_id: str
    entropy: int
    board: Board
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
    environment.show_cards([plan.devices[post.rank]] if plan.kind is Kind.PLAIN else plan.devices)
    environment.keep_gloo_here()
    _set_threads(plan.threads)
    place = Place(post.rank, plan.world_size, post.attempt, _port(wire), post.run_id)

    run = _run_plain if plan.kind is Kind.PLAIN else _run_distributed
    ending = _watched(run, plan, place, post)

    with suppress(OSError):  # there is nobody left to be told
        wire.sendall(ending.line())
    return _leave(ending.code)


def _tell_stacks(file: int) -> None:
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=file)


def _set_threads(count: int | None) -> None:
    if count is not None:
        import torch

        torch.set_num_threads(count)


def _port(wire: socket.socket) -> int:
    """Wait for the store's port, which the command process sends when all workers are forked."""
    with wire.makefile("rb", buffering=0) as stream:
        line = stream.readline()
    return int(line) if line else sys.exit(1)  # its end without a word: the command process is gone


def _run_plain(plan: Plan, place: Place, post: Post) -> None:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from duoka.plain import run_plain

    environment.hide_ranks()
    patience = timedelta(seconds=plan.timeout)
    server = TCPStore("127.0.0.1", place.port, is_master=False, timeout=patience)
    store = PrefixStore(f"attempt{place.attempt}", server)
    say = _sayer(quiet=plan.verbosity == "quiet" or place.rank > 0)
    run_plain(plan, place.rank, store, post.board.seat(place.rank), post.entropy, say)


def _run_distributed(plan: Plan, place: Place, post: Post) -> None:
    import torch

    environment.give_ranks(place)
    torch.default_generator.seed()  # under torchrun, too, every rank starts with random numbers of its own
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    run_target(plan.target, local_rank_args(plan, place.rank))


def local_rank_args(plan: Plan, rank: int) -> list[str]:
    """`--local_rank=N`, spelled as the script parses it, and in front as torch.distributed.launch has it."""
    flag = plan.local_rank_flag
    if flag is None or any(arg.partition("=")[0] == flag for arg in plan.target.args):
        return []
    return [f"{flag}={rank}"]


def _sayer(quiet: bool) -> Callable[[str], None]:
    def say(text: str) -> None:
        if not quiet and sys.__stderr__ is not None:
            print(f"duoka: {text}", file=sys.__stderr__, flush=True)

    return say


def _watched(run: Callable[[Plan, Place, Post], None], plan: Plan, place: Place, post: Post) -> Ending:
    """Run the script, and put into words how it ended."""
    host = socket.gethostname()
    try:
        run(plan, place, post)
    except SystemExit as error:
        code, said = _exit_code(error)
        if said and post.own_log:
            print(said, file=sys.stderr)
        lost = code != 0 and is_consequence(error)
        return Ending(place.rank, host, "exited", code, time.monotonic(), said=said, consequence=lost)
    except BaseException as error:
        return _raised(error, place.rank, host, post.own_log)
    return Ending(place.rank, host, "returned", 0, time.monotonic())


def _exit_code(error: SystemExit) -> tuple[int, str]:
    """The exit code that python gives to this SystemExit, and what it writes to standard error."""
    if error.code is None:
        return 0, ""
    if isinstance(error.code, int):
        return error.code & 0xFF, ""
    return 1, str(error.code)


def _raised(error: BaseException, rank: int, host: str, own_log: bool) -> Ending:
    now, whole = time.monotonic(), traces.shown(error)
    traces.trim(error)
    trace, lost = traces.shown(error), is_consequence(error)
    hook = _own_excepthook()
    if hook is not None and not lost:
        _call(lambda: hook(type(error), error, error.__traceback__))
    elif own_log:
        print(trace, end="", file=sys.stderr)
    return Ending(
        rank=rank,
        host=host,
        how="raised",
        code=_code_of(error),
        time=now,
        kind=type(error).__name__,
        error=traces.headline(error),
        trace=trace,
        whole=whole,
        consequence=lost,
        shown=hook is not None and not lost and not own_log,
    )


def _code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 2 if isinstance(error, AskedError) else 1


def _own_excepthook() -> Callable[[type[BaseException], BaseException, TracebackType | None], Any] | None:
    """The script's own sys.excepthook, if it set one; torch sets one, too, which only marks the lines."""
    hook = sys.excepthook
    if hook is sys.__excepthook__ or getattr(hook, "__module__", "").startswith("torch."):
        return None
    return hook


def is_consequence(error: BaseException) -> bool:
    """Whether this error, or one that it was raised for, only says that another rank went away."""
    return any(_is_network_error(one) for one in _chain(error))


def _is_network_error(error: BaseException) -> bool:
    if isinstance(error, (PeerLost, TimedOut)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if type(error).__name__ in ("DistBackendError", "DistNetworkError"):
        return True
    text = str(error).lower()
    return any(noise in text for noise in NETWORK_NOISE)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _leave(code: int) -> int:
    """What the interpreter does before it ends: threads, atexit functions, streams. Returns the exit code.

    The rest of its end is left out: nothing of it can be seen, and tearing down torch and CUDA takes time.
    """
    _call(threading._shutdown)  # type: ignore[attr-defined]  # as multiprocessing does for its children
    _call(atexit._run_exitfuncs)
    with suppress(Exception):
        sys.stderr.flush()
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except Exception as error:
        with suppress(Exception):
            said = f"Exception ignored in: {sys.stdout!r}\n{traces.headline(error)}"
            print(said, file=sys.stderr, flush=True)
        code = 120  # python's
    flush_c_streams()
    return code


def _call(function: Callable[[], object]) -> None:
    """Call what may raise at a moment when nobody is left to catch it; python, too, shows it and goes on."""
    try:
        function()
    except BaseException as error:
        with suppress(Exception):
            print(traces.shown(error), end="", file=sys.stderr, flush=True)
