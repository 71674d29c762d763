"""Who ends what the workers started, and removes their files, when the command process was killed and cannot.

The kernel ends the workers then. What they started, as loader workers or a program, it does not: a signal for
the death of a parent is not inherited, and would come when a mere thread ends.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from duoka.launchers.processes import session_members
from duoka.launchers.signals import blocked


@contextmanager
def heir(sessions: Sequence[int], temporary: str | None, let_go: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A process that waits for this one to die within, and then ends all that lives in these sessions.

    To be made when the workers are there, lest they hold the pipe open whose end tells it.

    Args:
        sessions: their leaders' pids.
        temporary: a directory that the workers may make; it is removed here, or else by the heir.
        let_go: closes in the heir what others hold this process for alive by.
    """
    reading, writing = os.pipe()
    with blocked():  # in the heir for good: nothing but its task, or SIGKILL, ends it
        pid = os.fork()
        if pid == 0:
            os.setsid()  # Ctrl-C is not for it
            os.close(writing)
            let_go()
            os.read(reading, 1)
            _end(sessions)
            _remove(temporary)
            os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        _remove(temporary)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(writing)


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _end(sessions: Sequence[int]) -> None:
    while members := session_members(sessions):
        for member in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
