"""Marks by which ranks that save together tell each other what is on the disk.

A rank leaves `rank-1.rows` when its rows are written. A rank other than 0 leaves the digests of its file in
`rank-1.json`, for which rank 0 waits before it writes the manifest. The mark may hold an error instead.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from duoka.checkpoint import disk
from duoka.checkpoint.manifest import FileEntry
from duoka.errors import CheckpointError

PATIENCE = 600.0  # seconds without a byte written by a rank for which rank 0 waits
_LOOK = 0.02  # seconds between two looks


def _mark(beside: Path, rank: int) -> Path:
    return beside / f"rank-{rank}.json"


def _tell(beside: Path, rank: int, value: Any) -> None:
    path = _mark(beside, rank)
    disk.write(path.with_suffix(disk.PARTIAL), (json.dumps(value).encode(),))
    os.rename(path.with_suffix(disk.PARTIAL), path)


def report(beside: Path, rank: int, entries: Mapping[str, FileEntry]) -> None:
    """Tell rank 0 that this rank's files are on the disk."""
    _tell(beside, rank, {name: asdict(entry) for name, entry in entries.items()})


def give_up(beside: Path, rank: int, why: str) -> None:
    """Tell rank 0 that this rank cannot write its files; if not even that can be written, remove the directory."""
    try:
        _tell(beside, rank, {"error": why})
    except OSError:
        with suppress(OSError):
            disk.remove(beside)


def say_written(beside: Path, rank: int) -> None:
    """Tell the other ranks that this rank's rows are on the disk, or, again, that it goes on."""
    disk.touch(_rows_mark(beside, rank))


def _rows_mark(beside: Path, rank: int) -> Path:
    return beside / f"rank-{rank}.rows"


def wait_for_rows(beside: Path, ranks: Collection[int], patience: float = PATIENCE) -> None:
    """Wait until other ranks have written their rows. Raises CheckpointError as `wait_for`."""

    def take(rank: int) -> bool:
        with suppress(FileNotFoundError):
            _raise_error(json.loads(_mark(beside, rank).read_bytes()), rank)
        return _rows_mark(beside, rank).exists()

    _wait(beside, ranks, take, patience)


def wait_for(beside: Path, ranks: Collection[int], patience: float = PATIENCE) -> dict[str, FileEntry]:
    """Wait for the files of other ranks, remove their marks, and return their digests.

    Raises:
        CheckpointError: a rank could not write its files, or has written nothing for `patience` seconds.
    """
    found: dict[str, FileEntry] = {}

    def take(rank: int) -> bool:
        with suppress(FileNotFoundError):
            mark = json.loads(_mark(beside, rank).read_bytes())
            _raise_error(mark, rank)
            found.update({name: FileEntry(**entry) for name, entry in mark.items()})
            _mark(beside, rank).unlink()
            return True
        return False

    _wait(beside, ranks, take, patience)
    for rank in (0, *ranks):
        _rows_mark(beside, rank).unlink(missing_ok=True)
    return found


def _raise_error(mark: Mapping[str, Any], rank: int) -> None:
    if "error" in mark:
        raise CheckpointError(f"rank {rank} could not write its part of the checkpoint: {mark['error']}")


def _wait(beside: Path, ranks: Collection[int], take: Callable[[int], bool], patience: float) -> None:
    """Wait until `take` has returned True for each rank."""
    missing, last, since = set(ranks), (-1, -1), time.monotonic()
    while missing := {rank for rank in sorted(missing) if not take(rank)}:
        if not beside.exists():
            raise CheckpointError("another rank could not write its part of the checkpoint, nor report the reason")
        now, present = time.monotonic(), _progress(beside)
        if present != last:
            last, since = present, now
        if now - since > patience:
            names = ", ".join(map(str, sorted(missing)))
            raise CheckpointError(f"rank {names} has written nothing of the checkpoint for {patience:.0f} s")
        time.sleep(_LOOK)


def _progress(directory: Path) -> tuple[int, int]:
    """Return the size of all files, and the time of the last write."""
    with suppress(OSError):
        found = [path.stat() for path in directory.iterdir()]
        return sum(each.st_size for each in found), max((each.st_mtime_ns for each in found), default=0)
    return -1, -1
