"""Functions of the C library and of Python's C API that Python does not offer."""

from __future__ import annotations

import ctypes
import errno
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
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # the largest one allowed by mallopt(3)
SYNC_FILE_RANGE_WRITE = 2


def _of_linux(name: str) -> Any:
    """Return a function of the C library; None on other systems than Linux, and where it is missing."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if sys.platform == "linux" else None


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, with pid `parent`, dies."""
    if (control := _of_linux("prctl")) is None:
        return
    if control(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def clock_is_synchronised() -> bool | None:
    """Return whether the kernel's clock is synchronised (NTP); None if the kernel does not report it."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zero: only reads
    except AttributeError:
        return None
    return None if state < 0 else state != TIME_ERROR


def raise_in_thread(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in another Python thread, as soon as it executes Python code again."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


@contextmanager
def names_from_files() -> Iterator[None]:
    """Within the context, resolve host names by /etc/hosts alone, without asking a name server."""
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
    """Return the sources of host names in /etc/nsswitch.conf, such as `files dns`; None if unknown."""
    try:
        with open("/etc/nsswitch.conf", "rb") as file:
            lines = [line.partition(b"#")[0].strip() for line in file]
    except OSError:
        return None
    entries = [line.partition(b":")[2].strip() for line in lines if line.startswith(b"hosts:")]
    return entries[-1] if entries else None


def flush_c_streams() -> None:
    """Flush C's stdio buffers, to which extension modules print: os._exit does not."""
    ctypes.CDLL(None).fflush(None)


@contextmanager
def muted() -> Iterator[None]:
    """Within the context, discard what is written to standard output, by C code too."""
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
    """End the OpenMP threads of this thread; its next parallel loop starts new ones.

    After a fork the pool exists without its threads, and GNU OpenMP waits for them for ever. Returns whether no
    thread is left.
    """
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps") as maps:
        libraries = set(re.findall(r"/.*/lib(?:gomp|iomp5|omp)\b\S*", maps.read()))
    ended = True
    for path in libraries:
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # of OpenMP 5.0
        ended = ended and pause is not None and pause(HARD_PAUSE) == 0
    return ended


def keep_freed_memory(limit: int) -> None:
    """Let glibc's malloc keep freed memory instead of returning it to the kernel.

    limit: bytes kept at the end of the heap.
    """
    if mallopt := _of_linux("mallopt"):
        mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, limit)


def return_freed_memory() -> None:
    """Let glibc's malloc return all free pages to the kernel, also those between memory in use."""
    if trim := _of_linux("malloc_trim"):
        trim(0)


def begin_writeback(fd: int, start: int, size: int) -> None:
    """Ask the kernel to start writing these bytes of a file to disk; fsync reports errors."""
    if begin := _of_linux("sync_file_range"):
        begin(fd, ctypes.c_int64(start), ctypes.c_int64(size), SYNC_FILE_RANGE_WRITE)


def reserve(fd: int, size: int) -> None:
    """Reserve room on the disk for the first `size` bytes of a file, where its file system can.

    Raises OSError if the disk is full.
    """
    allocate = _of_linux("fallocate")
    if allocate is not None and allocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise OSError(number, os.strerror(number))
