"""Crash-safe writes: after a crash a file is either the old or the new one.

Write a partial file, fsync it, rename it, fsync the directory. All changes of the disk are made here, through
`os.open`, `os.write`, `os.fsync`, `os.rename` and the like, which the tests make fail one call at a time.
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
from duoka.system.machine import machine_name

PARTIAL = ".partial"  # suffix of files that are incomplete or about to be removed
_PARTIAL = re.compile(rf"\..+\.([0-9a-f]{{8}})-(\d+)-[0-9a-f]{{8}}{re.escape(PARTIAL)}")
PIECE = 16 << 20  # bytes written at once

Data = bytes | memoryview


def write(path: Path, parts: Iterable[Data]) -> None:
    """Write a new file and fsync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        at = 0
        for part in parts:
            rest = memoryview(part)
            while len(rest):
                count = os.write(fd, rest[:PIECE])
                # Start writing to the disk while the next piece is copied to the kernel.
                libc.begin_writeback(fd, at, count)
                at, rest = at + count, rest[count:]
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


def write_at(path: Path, parts: Iterable[tuple[int, Data]]) -> None:
    """Write parts of a file that other processes write to, too: each at its offset, ascending; and fsync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        begun: int | None = None  # offset up to which writing to the disk has begun
        for start, part in parts:
            at, rest = start, memoryview(part)
            begun = at if begun is None else begun
            while len(rest):
                count = os.pwrite(fd, rest[:PIECE], at)
                at, rest = at + count, rest[count:]
                if at - begun >= PIECE:
                    libc.begin_writeback(fd, begun, at - begun)
                    begun = at
        os.fsync(fd)
    finally:
        os.close(fd)


def touch(path: Path) -> None:
    """Make an empty file, or set its time to now."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    os.utime(path)


def replace(path: Path, write_to: Callable[[Path], None]) -> None:
    """Let `write_to` create a partial file, then rename it to `path`. Symbolic links are followed."""
    beside = place_beside(path)
    try:
        write_to(beside)
        put(beside, path)
    except BaseException:
        discard(beside)
        raise


def place_beside(path: Path) -> Path:
    """Return a name for the partial file of `path`, links followed; its directory is made if it is missing.

    Partial files there of processes that were killed are removed.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = _machine()
    for entry in os.listdir(path.parent):
        found = _PARTIAL.fullmatch(entry)
        if found and found[1] == machine and not _runs(int(found[2])):
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
    sync(path.parent)


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
    os.rename(directory, beside)
    shutil.rmtree(beside, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove partial files of earlier runs that crashed. The caller must hold the directory's lock."""
    for entry in directory.iterdir():
        if entry.name.startswith(".") and entry.name.endswith(PARTIAL):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(entry)
