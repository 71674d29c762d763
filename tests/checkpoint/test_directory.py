"""The lock of a run's directory. test_checkpoint.py tests runs that exclude each other, and damaged files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from duoka.checkpoint.directory import LOCK, Lock
from duoka.errors import CheckpointBusy, CheckpointError


def test_one_at_a_time(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(CheckpointBusy, match=f"process {os.getpid()} on "):
        Lock(tmp_path)
    lock.release()
    Lock(tmp_path).release()


@pytest.mark.parametrize(
    "plant",
    [
        lambda path, other: path.symlink_to(other),
        lambda path, other: os.link(other, path),
        lambda path, other: os.mkfifo(path),
        lambda path, other: path.mkdir(),
    ],
    ids=["symbolic link", "link", "fifo", "directory"],
)
def test_what_somebody_has_planted_is_left_alone(plant: Callable[[Path, Path], None], tmp_path: Path) -> None:
    other = tmp_path / "precious"
    other.write_text("content")
    folder = tmp_path / "saved"
    folder.mkdir()
    plant(folder / LOCK, other)
    with pytest.raises(CheckpointError, match="must be a plain file of your own"):
        Lock(folder)
    assert other.read_text() == "content"
