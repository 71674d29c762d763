"""Crash-safe writes: after a crash a file is either the old or the new one.

Write a partial file, fsync it, rename it, fsync the directory. All changes of the disk are made through `os.open`,
`os.pwrite`, `os.fsync`, `os.rename` and the like, which the tests make fail one call at a time.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from duoka.system import libc
from duoka.system.processes import machine_name

PARTIAL = ".partial"  # suffix of files that are incomplete or about to be removed
_PARTIAL = re.compile(rf"\..+\.([0-9a-f]{{8}})-(\d+)-[0-9a-f]{{8}}{re.escape(PARTIAL)}")
BLOCK = 16 << 20  # bytes written at once

Data = bytes | memoryview


def write(path: Path, parts: Iterable[tuple[int, Data]]) -> None:
    """Write parts of a file, each at its offset, ascending; and fsync it. Other processes may write other parts."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        begun: int | None = None  # offset up to which writing to the disk has begun
        for at, part in parts:
            rest = memoryview(part)
            begun = at if begun is None else begun
            while len(rest):
                count = os.pwrite(fd, rest[:BLOCK], at)
                at, rest = at + count, rest[count:]
                # Start writing to the disk while the next block is copied to the kernel.
                if at - begun >= BLOCK:
                    libc.begin_writeback(fd, begun, at - begun)
                    begun = at
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve(path: Path, size: int) -> None:
    """Make a file of `size` bytes, or extend it, and reserve room for it on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        libc.reserve(fd, size)  # faster than a file with holes, which several processes fill
        os.truncate(fd, size)
    finally:
        os.close(fd)


def replace(path: Path, write_to: Callable[[Path], None]) -> None:
    """Let `write_to` create a partial file, then rename it to `path`. Symbolic links are followed."""
    beside = partial_of(path)
    try:
        write_to(beside)
        put(beside, path)
    except BaseException:
        discard(beside)
        raise


def replace_by(path: Path, data: Data) -> None:
    """Let a file contain these bytes. Symbolic links are followed."""
    replace(path, lambda beside: write(beside, [(0, data)]))


def partial_of(path: Path) -> Path:
    """Name the partial file of `path`, links followed; its directory is made if it is missing.

    Partial files there of processes that were killed are removed.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    for entry in os.listdir(path.parent):
        maker = _PARTIAL.fullmatch(entry)
        if maker and maker[1] == _machine() and not _runs(int(maker[2])):  # pids of other machines say nothing here
            discard(path.parent / entry)
    return partial(path)


def _machine() -> str:
    return hashlib.sha256(machine_name().encode()).hexdigest()[:8]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        pass
    return True


def put(beside: Path, path: Path) -> None:
    """Rename a complete partial file to `path`. Symbolic links are followed."""
    path = Path(os.path.realpath(path))
    os.rename(beside, path)
    sync(path.parent)  # else the old file may be back after a power failure


def discard(beside: Path) -> None:
    """Remove a partial file, if it is there."""
    with suppress(OSError):
        os.unlink(beside)


def partial(path: Path) -> Path:
    """Return an unused name for a partial file in the same directory; it names this machine and process."""
    return path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")


def sync(path: Path) -> None:
    """fsync a file; or a directory, so that renames in it are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(directory: Path) -> None:
    """Remove a directory atomically: rename it, then delete it."""
    beside = partial(directory)
    os.rename(directory, beside)  # what a crash leaves of it is swept, and not taken for a whole one
    shutil.rmtree(beside, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove partial files and directories of earlier runs that crashed. The caller holds the directory's lock."""
    for entry in directory.glob(f".*{PARTIAL}"):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            discard(entry)
