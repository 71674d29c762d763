"""Errors of DataLoader workers that die, and of those whose rank dies.

torch's SIGCHLD handler raises an error that a worker died in whatever code runs at that moment.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from contextlib import suppress
from types import FrameType, TracebackType

from duoka.private.python import set_resource_sharer_sys

DYING = 0.5  # seconds between the break of a process's connections and SIGCHLD


def delay_errors_in_tempfile() -> None:
    """Delay torch's error while `tempfile` creates or removes a file, which would otherwise be left behind.

    A loader that waits for the dead worker notices by itself.
    """
    from duoka.private.torch import LOADER_DEATHS

    raise_deaths = getattr(*LOADER_DEATHS)

    def raise_deaths_later() -> None:
        if not _is_within(tempfile.__name__):
            raise_deaths()

    setattr(*LOADER_DEATHS, raise_deaths_later)


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
    """Return torch's error that a loader worker died, if that caused this connection error; else `error`."""
    if "torch" not in sys.modules or not isinstance(error, (EOFError, ConnectionError)):
        return error
    from duoka.private.torch import LOADER_DEATHS, loaders_have_workers

    if not loaders_have_workers():
        return error
    until = time.monotonic() + DYING
    while time.monotonic() < until:
        try:
            getattr(*LOADER_DEATHS)()
        except RuntimeError as died:
            died.__suppress_context__ = True
            return died.with_traceback(error.__traceback__)
        time.sleep(0.01)
    return error


def _is_within(module: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None
