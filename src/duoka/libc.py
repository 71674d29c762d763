"""The calls of the C library that python has no words for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
SYNC_FILE_RANGE_WRITE = 2


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which has just forked it, dies in whatever way."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def flush_c_streams() -> None:
    """Write out what extension modules printed through C's stdio: os._exit does not."""
    ctypes.CDLL(None).fflush(None)


def begin_writeback(fd: int, start: int, size: int) -> None:
    """Ask the kernel to begin to write these bytes of a file to its disk. A hint: what goes wrong, fsync will say."""
    if sys.platform == "linux":
        ctypes.CDLL(None).sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(size), SYNC_FILE_RANGE_WRITE)
