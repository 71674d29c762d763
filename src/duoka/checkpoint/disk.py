"""Writing so that a crash, at whatever moment, leaves the old or the new and never half of it.

Beside its place, synced, then renamed; then the directory is synced. All that changes the disk is in this file,
through `os.open`, `os.write`, `os.fsync`, `os.rename` and the like, which the tests let fail one call at a time.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from duoka import libc

PARTIAL = ".partial"  # the ending of what is not complete, or about to be removed
PIECE = 16 << 20  # bytes written at once

Data = bytes | memoryview


def write(path: Path, parts: Iterable[Data]) -> None:
    """Write a new file, and see it safely on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        at = 0
        for part in parts:
            rest = memoryview(part)
            while len(rest):
                count = os.write(fd, rest[:PIECE])
                libc.begin_writeback(fd, at, count)  # the disk works while the next piece is copied to the kernel
                at, rest = at + count, rest[count:]
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: Path, write_to: Callable[[Path], None]) -> None:
    """Let `write_to` make a file beside `path`, then put it there in one go. A link stays a link."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = partial(path)
    try:
        write_to(beside)
        os.rename(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    sync_directory(path.parent)


def partial(path: Path) -> Path:
    """A name beside `path` that nobody else uses, and that tells what it is."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def sync(path: Path) -> None:
    """See a file, that somebody else has written, safely on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """See the names in a directory safely on the disk."""
    sync(path)


def remove(directory: Path) -> None:
    """Remove a directory such that a crash does not leave half of it under its name."""
    beside = partial(directory)
    os.rename(directory, beside)
    shutil.rmtree(beside, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what earlier runs left that died while they wrote. Only for who alone writes there."""
    for entry in directory.iterdir():
        if entry.name.startswith(".") and entry.name.endswith(PARTIAL):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(entry)
