"""The calls of the C library, and of python's own, that python has no words for."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PR_SET_PDEATHSIG = 1
TIME_ERROR = 5  # of adjtimex: the clock is not synchronised
HARD_PAUSE = 2  # of omp_pause_resource_all
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # that mallopt(3) promises to take
SYNC_FILE_RANGE_WRITE = 2


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which has just forked it, dies in whatever way."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def clock_is_synchronised() -> bool | None:
    """Whether the kernel says that its clock is kept in step with the world's; None where it does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zero: asks, and sets nothing
    except AttributeError:
        return None
    return None if state < 0 else state != TIME_ERROR


def raise_in_thread(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in another thread of Python as soon as it is back from what it calls now."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


@contextmanager
def names_from_files() -> Iterator[None]:
    """Meanwhile this process asks no name server: names and addresses of hosts come from /etc/hosts alone."""
    library, usual = ctypes.CDLL(None), _usual_names()
    configure: Any = getattr(library, "__nss_configure_lookup", lambda *_: -1)  # of glibc
    if usual is None or configure(b"hosts", b"files") != 0:
        yield
        return
    try:
        yield
    finally:
        configure(b"hosts", usual)


def _usual_names() -> bytes | None:
    """Where names of hosts come from: `files dns`; None where it cannot be told."""
    try:
        with open("/etc/nsswitch.conf", "rb") as file:
            lines = [line.partition(b"#")[0].strip() for line in file]
    except OSError:
        return None
    found = [line.partition(b":")[2].strip() for line in lines if line.startswith(b"hosts:")]
    return found[-1] if found else None


def flush_c_streams() -> None:
    """Write out what extension modules printed through C's stdio: os._exit does not."""
    ctypes.CDLL(None).fflush(None)


@contextmanager
def muted() -> Iterator[None]:
    """What C code writes to standard output meanwhile is lost; what Python prints is too, if it is written out."""
    flush_c_streams()
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        flush_c_streams()
        os.dup2(kept, 1)
        os.close(kept)


def end_thread_pools() -> bool:
    """End the OpenMP threads that this thread keeps for its parallel loops; the next loop starts new ones.

    After a fork such a pool is there without its threads, and GNU's OpenMP waits for them for ever. Returns whether
    none is left.
    """
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps") as maps:
        found = set(re.findall(r"/.*/lib(?:gomp|iomp5|omp)\b\S*", maps.read()))
    ended = True
    for path in found:
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # of OpenMP 5.0
        ended = ended and pause is not None and pause(HARD_PAUSE) == 0
    return ended


def keep_freed_memory(limit: int) -> None:
    """Have glibc's malloc use freed memory again, instead of giving it back and asking the kernel for it anew.

    limit: bytes that are kept at the end of the heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, limit)


def begin_writeback(fd: int, start: int, size: int) -> None:
    """Ask the kernel to begin to write these bytes of a file to its disk. A hint: what goes wrong, fsync will say."""
    if sys.platform == "linux":
        ctypes.CDLL(None).sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(size), SYNC_FILE_RANGE_WRITE)
