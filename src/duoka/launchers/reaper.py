"""End what the workers started, and remove their files, if the command process is killed.

The kernel then kills the workers (PR_SET_PDEATHSIG), but not the processes that they started, such as loader workers:
they do not inherit that setting, and it also triggers when only a thread of the parent ends.
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
def orphan_reaper(
    sessions: Sequence[int], temporary: str | None, close_files: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within the context, run a process that ends all processes of these sessions if this process dies.

    Enter it after forking the workers, which must not inherit the pipe: its end of file tells that this process died.

    Args:
        sessions: pids of the session leaders.
        temporary: directory that the workers may create; removed at the end, or by the reaper.
        close_files: closes, in the reaper, files that would keep connections of this process open.
    """
    reading, writing = os.pipe()
    with blocked():  # in the reaper for ever: only SIGKILL ends it before its work is done
        pid = os.fork()
        if pid == 0:
            os.setsid()  # so that Ctrl-C does not reach it
            os.close(writing)
            close_files()
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
