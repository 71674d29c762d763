"""Errors that a script would otherwise not get, or get in the wrong place.

Of debuggers in several workers, which share one terminal; of DataLoader workers that die, and of those whose rank
dies. torch's SIGCHLD handler raises an error that a worker died in whatever code runs at that moment, and only once.
If that code swallows it, the loader later raises one that does not say what ended the worker.
"""

from __future__ import annotations

import bdb
import pdb  # noqa: T100
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from duoka.errors import Refused
from duoka.planning.plan import Kind
from duoka.private.python import set_resource_sharer_sys
from duoka.system import environment

DYING = 0.5  # seconds between the break of a process's connections and SIGCHLD
EXITED = "exited unexpectedly"  # in a loader's own error


def refuse_debuggers(kind: Kind, world_size: int, rank: int) -> None:
    """Let breakpoints raise an error that says how to debug, in workers where a debugger would hang or end at once.

    Rank 0 of a script that knows its rank can be debugged: the terminal is its own. A debugger that does not read
    standard input, such as one on a socket, works everywhere.
    """
    if rank == 0 and kind is not Kind.PLAIN:
        return
    other = ", or call it on rank 0 alone" if kind is not Kind.PLAIN else ""

    def refusal(name: str, more: str = "") -> Refused:
        return Refused(
            f"{name} in {world_size} workers, which cannot share the terminal; use one device "
            f"(--devices cpu:1, --devices 0,), where it works as under python{other}{more}"
        )

    def refuse_breakpoint(*args: Any, **how: Any) -> None:
        raise refusal("breakpoint()", "; PYTHONBREAKPOINT=0 ignores it")

    if environment.variable("PYTHONBREAKPOINT") is None:
        sys.breakpointhook = refuse_breakpoint
    _check_before(bdb.Bdb, "set_trace", lambda: refusal("pdb"))
    _check_before(pdb.Pdb, "interaction", lambda: refusal("pdb"))  # pdb.post_mortem sets no trace


def _check_before(owner: Any, name: str, refusal: Callable[[], Refused]) -> None:
    """Let a debugger's method raise `refusal()` if it would read this process's standard input."""
    original = getattr(owner, name)

    def checked(self: Any, frame: FrameType | None = None, *args: Any, **how: Any) -> Any:
        if getattr(self, "stdin", sys.stdin) in (sys.stdin, sys.__stdin__):
            raise refusal()
        caller = sys._getframe(1) if name == "set_trace" else None  # its default: the caller's frame
        return original(self, frame or caller, *args, **how)

    setattr(owner, name, checked)


# DataLoader workers.


class _Handler:
    """torch's SIGCHLD handler, which keeps its error, and raises none while `tempfile` creates or removes a file.

    Otherwise that file would be left behind. A loader that waits for the dead worker notices by itself.
    """

    def __init__(self, raise_deaths: Callable[[], None]) -> None:
        self._raise_deaths = raise_deaths
        self.raised: RuntimeError | None = None

    def __call__(self) -> None:
        try:
            self._raise_deaths()
        except RuntimeError as died:
            self.raised = died
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__") != tempfile.__name__:
                frame = frame.f_back
            if frame is None:
                raise


def keep_loader_errors() -> None:
    """Replace torch's SIGCHLD handler by one whose errors `cause_of` finds, even if they were swallowed."""
    from duoka.private.torch import LOADER_DEATHS

    setattr(*LOADER_DEATHS, _Handler(getattr(*LOADER_DEATHS)))


def hide_lost_rank_errors() -> None:
    """Let loader workers print no error when their rank died while they fetched a batch; the run's report has it."""
    # Their thread that serves tensors to the rank prints errors itself, by `sys.excepthook`.
    set_resource_sharer_sys(_SysWithoutLostRanks)


class _SysWithoutLostRanks:
    exc_info = staticmethod(sys.exc_info)

    @staticmethod
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (ConnectionError, EOFError)):
            sys.excepthook(kind, error, trace)


def disable_loader_errors() -> None:
    """Remove torch's SIGCHLD handler, so that it raises no error any more."""
    while True:
        with suppress(RuntimeError):  # raised by the handler just now
            if getattr(signal.getsignal(signal.SIGCHLD), "__module__", "").startswith("torch."):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return


def cause_of(error: BaseException) -> BaseException:
    """Return torch's error that a loader worker died, if that caused this connection error; else `error`.

    A loader's own error that a worker exited unexpectedly gets torch's error as its cause.
    """
    if "torch" not in sys.modules or not isinstance(error, (EOFError, ConnectionError, RuntimeError)):
        return error
    from duoka.private.torch import loaders_have_workers

    if not loaders_have_workers():
        return error
    if not isinstance(error, RuntimeError):
        died = _death_within(DYING)
        return error if died is None else died.with_traceback(error.__traceback__)
    if EXITED in str(error) and not isinstance(error.__cause__, RuntimeError):
        error.__cause__ = _death_within(0)
    return error


def _death_within(seconds: float) -> RuntimeError | None:
    """Return torch's error that a loader worker died; None if there is none within this time."""
    from duoka.private.torch import LOADER_DEATHS

    handler = getattr(*LOADER_DEATHS)
    until = time.monotonic() + seconds
    while True:
        died: RuntimeError | None = getattr(handler, "raised", None)
        try:
            handler()  # by hand: `disable_loader_errors` has removed it from SIGCHLD
        except RuntimeError as raised:
            died = raised
        if died is not None:
            died.__suppress_context__ = True
            return died
        if time.monotonic() >= until:
            return None
        time.sleep(0.01)
