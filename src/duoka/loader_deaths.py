"""The deaths of a loader's workers, and of the ranks that they load for: who is told of them, and when.

torch's handler of SIGCHLD raises that a worker died, in whatever is running just then.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from contextlib import suppress
from types import FrameType, TracebackType

from duoka.private.python import show_sharers_errors_by

DYING = 0.5  # seconds from where a process's connections break to where the kernel tells its death


def spare_temporary_files() -> None:
    """From now on nothing is raised while one is made or removed, which would leave it behind.

    The loader that waits for the worker finds its death by itself.
    """
    from duoka.private.torch import LOADER_DEATHS

    raise_deaths = getattr(*LOADER_DEATHS)

    def raise_deaths_later() -> None:
        if not _is_within(tempfile.__name__):
            raise_deaths()

    setattr(*LOADER_DEATHS, raise_deaths_later)


def forgive_lost_ranks() -> None:
    """From now on a worker does not show that its rank went away while it fetched a batch: the run's report does."""
    show_sharers_errors_by(_ForgivingSys)


class _ForgivingSys:
    exc_info = staticmethod(sys.exc_info)

    @staticmethod
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (ConnectionError, EOFError)):
            sys.excepthook(kind, error, trace)


def hush() -> None:
    """From now on nothing is raised at all."""
    while True:
        with suppress(RuntimeError):  # it has just been
            if getattr(signal.getsignal(signal.SIGCHLD), "__module__", "").startswith("torch."):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return


def told(error: BaseException) -> BaseException:
    """The error to tell: of a connection that broke, torch's that a loader's worker died, if that is why."""
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
