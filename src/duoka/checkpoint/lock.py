"""A file lock on a checkpoint directory. The kernel releases it when the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import weakref
from pathlib import Path

from duoka.errors import CheckpointBusy, CheckpointError

NAME = ".lock"


class Lock:
    """A lock held until `release`, garbage collection, or the end of the process."""

    def __init__(self, directory: Path) -> None:
        fd = _open(directory / NAME)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
            os.close(fd)
            raise CheckpointBusy(
                f"{directory} is being written by another run{f' ({holder})' if holder else ''}; "
                "end that one, or give this one another directory"
            ) from error
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError:  # the disk is full
            os.close(fd)
            raise
        self._close = weakref.finalize(self, os.close, fd)
        # A child process that outlives this one (a loader's worker) must not keep the lock.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _unlock(mine()))

    def release(self) -> None:
        """Release the lock."""
        self._close()


def _open(path: Path) -> int:
    """Open the lock file, refusing links and files of others.

    Raises:
        CheckpointError: it is not a regular file of this user.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_ours(path) from None
        raise
    found = os.fstat(fd)
    ours = found.st_uid in (os.getuid(), path.parent.stat().st_uid)  # a file server may assign both to another user
    if not (stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and ours):
        os.close(fd)
        raise _not_ours(path)
    return fd


def _not_ours(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} must be a plain file of your own, and is not; remove it, or name another directory"
    )


def _unlock(lock: Lock | None) -> None:
    if lock is not None:
        lock.release()
