from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duoka.plain.files import of_files_only, open_null_file

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.binary(max_size=9)),
        st.tuples(st.just("seek"), st.integers(-3, 12), st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])),
        st.tuples(st.just("truncate"), st.one_of(st.none(), st.integers(0, 12))),
        st.tuples(st.just("tell")),
    ),
    max_size=12,
)


def told(file: Any, steps: list[Any]) -> list[Any]:
    found: list[Any] = []
    for name, *args in steps:
        try:
            found.append(getattr(file, name)(*args))
        except OSError as error:
            found.append(str(error))
    return found


@given(mode=st.sampled_from(["wb", "ab"]), steps=STEPS)
@example(mode="wb", steps=[("seek", 1), ("write", b""), ("seek", 0, os.SEEK_END)])
@example(mode="ab", steps=[("write", b"12"), ("seek", 0), ("write", b""), ("tell",), ("write", b"3"), ("tell",)])
def test_it_tells_what_a_file_tells(tmp_path_factory: pytest.TempPathFactory, mode: str, steps: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "file"
    path.write_bytes(b"old")
    with open(path, mode, buffering=0) as file, open_null_file(path, mode, 0, size=path.stat().st_size) as other:
        assert told(other, steps) == told(file, steps)


def test_text_and_buffers(tmp_path: Path) -> None:
    with open_null_file("log", "a", encoding="utf-16", newline="\r\n", size=4) as file:
        assert (file.tell(), file.write("多卡\n"), file.name) == (4, 3, "log")
    with open_null_file("log", "wb") as file:
        assert isinstance(file, io.BufferedWriter)


def test_what_only_files_know(tmp_path: Path) -> None:
    fsync = partial(of_files_only, os.fsync)
    with open_null_file("log", "wb") as file, open(tmp_path / "real", "wb") as real:
        fsync(file.fileno())
        fsync(file)
        fsync(real)
        with pytest.raises(OSError, match="Invalid argument"):
            os.fsync(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        fsync(987)
