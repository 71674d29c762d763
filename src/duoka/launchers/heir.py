"""Who ends what the workers started, when the command process was killed and cannot.

The kernel ends the workers then. What they started, as loader workers or a program, it does not: a signal for
the death of a parent is not inherited, and would come when a mere thread ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from duoka.launchers.processes import session_members
from duoka.launchers.signals import blocked


@contextmanager
def heir(sessions: Sequence[int]) -> Iterator[None]:
    """A process that waits for this one to die within, and then ends all that lives in these sessions.

    To be made when the workers are there, lest they hold the pipe open whose end tells it.
    """
    reading, writing = os.pipe()
    with blocked():  # in the heir for good: nothing but its task, or SIGKILL, ends it
        pid = os.fork()
        if pid == 0:
            os.setsid()  # Ctrl-C is not for it
            os.close(writing)
            os.read(reading, 1)
            _end(sessions)
            os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(writing)


def _end(sessions: Sequence[int]) -> None:
    while members := session_members(sessions):
        for member in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
