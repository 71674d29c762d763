from __future__ import annotations

import os
from pathlib import Path

import pytest

from duoka.checkpoint import formats
from duoka.errors import WeightsError


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html>", "is a web page, not weights"),
        (b"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
        (b"hello world", "has no format that duoka knows (it begins with b'hello wo')"),
    ],
)
def test_files_that_are_no_weights(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "net.pth").write_bytes(content)
    with pytest.raises(WeightsError) as error:
        formats.read(tmp_path / "net.pth")
    assert told in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "model.pth").touch()
    with pytest.raises(WeightsError, match=r"there is no file .*; did you mean '.*/model\.pth'\?"):
        formats.read(tmp_path / "modle.pth")
    with pytest.raises(WeightsError, match=r"there is no directory '.*' either"):
        formats.read(tmp_path / "no" / "model.pth")
    with pytest.raises(WeightsError, match=r"there is no file|null byte"):
        formats.read("a\0b")


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(WeightsError, match=r"holds no weights in a format that duoka knows \(notes\.txt\)"):
        formats.read(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "net.pth").write_bytes(b"\x80")
    (tmp_path / "net.pth").chmod(0)
    with pytest.raises(WeightsError, match=r"cannot be read: .*Permission denied"):
        formats.read(tmp_path / "net.pth")
