from __future__ import annotations

import resource
from pathlib import Path

import pytest

from duoka.doctor import host
from duoka.doctor.host import check_cores, check_files, check_memory, check_shared_memory, check_threads

GIB = 1 << 30


def test_cores() -> None:
    assert check_cores(8, 8).what == "8"
    assert "of 64; a container or CPU affinity" in check_cores(8, 64).what


@pytest.mark.parametrize(
    ("omp", "level"),
    [(None, "ok"), ("4", "ok"), ("64", "advice"), ("x", "advice"), ("0", "advice"), ("2,4", "advice")],
)
def test_threads(omp: str | None, level: str) -> None:
    assert check_threads(omp, 8).level == level


def test_memory() -> None:
    assert check_memory(16 * GIB, 4 * GIB).level == "ok"
    assert check_memory(16 * GIB, 15 * GIB).level == "advice"
    assert (
        check_memory(16 * GIB, 4 * GIB, limited=True).what
        == "12.0 of 16.0 GiB, the limit of this container, are free"
    )


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_shared_memory(tmp_path).level == "ok"
    monkeypatch.setattr(host, "LITTLE_SHARED", 1 << 60)
    assert check_shared_memory(tmp_path).level == "advice"
    assert "--shm-size" in check_shared_memory(tmp_path).todo
    monkeypatch.setattr(host, "NO_SHARED", 1 << 60)
    assert check_shared_memory(tmp_path).level == "fault"
    assert check_shared_memory(tmp_path / "none").level == "fault"


@pytest.mark.parametrize(
    ("limit", "level"), [(64, "fault"), (1024, "advice"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_open_files(limit: int, level: str) -> None:
    assert check_files(limit).level == level
