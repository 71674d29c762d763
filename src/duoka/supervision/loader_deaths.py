"""Errors of DataLoader workers that die, and of those whose rank dies.

torch's SIGCHLD handler raises an error that a worker died in whatever code runs at that moment, and only once. If
that code swallows it, the loader later raises one that does not say what ended the worker.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

from duoka.private.python import set_resource_sharer_sys

DYING = 0.5  # seconds between the break of a process's connections and SIGCHLD
EXITED = "exited unexpectedly"  # in a loader's own error


class _Handler:
    """torch's handler, which keeps its error, and does not raise it while `tempfile` creates or removes a file.

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
            if not _is_within(tempfile.__name__):
                raise


def keep_errors() -> None:
    """Replace torch's SIGCHLD handler by one whose errors `cause_of` finds, even if they were swallowed."""
    from duoka.private.torch import LOADER_DEATHS

    setattr(*LOADER_DEATHS, _Handler(getattr(*LOADER_DEATHS)))


def hide_lost_rank_errors() -> None:
    """Let loader workers print no error when their rank died while they fetched a batch; the run's report has it."""
    set_resource_sharer_sys(_SysWithoutLostRanks)


class _SysWithoutLostRanks:
    exc_info = staticmethod(sys.exc_info)

    @staticmethod
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (ConnectionError, EOFError)):
            sys.excepthook(kind, error, trace)


def disable() -> None:
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
            handler()
        except RuntimeError as raised:
            died = raised
        if died is not None:
            died.__suppress_context__ = True
            return died
        if time.monotonic() >= until:
            return None
        time.sleep(0.01)


def _is_within(module: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None
