from __future__ import annotations

import resource
from pathlib import Path

import pytest

from duoka.doctor import limits
from duoka.doctor.limits import of_cores, of_files, of_memory, of_shared_memory, of_threads

GIB = 1 << 30


def test_cores() -> None:
    assert of_cores(8, 8).what == "8"
    assert "of 64; a container or an affinity" in of_cores(8, 64).what


@pytest.mark.parametrize(
    ("omp", "level"),
    [(None, "ok"), ("4", "ok"), ("64", "advice"), ("x", "advice"), ("0", "advice"), ("2,4", "advice")],
)
def test_threads(omp: str | None, level: str) -> None:
    assert of_threads(omp, 8).level == level


def test_memory() -> None:
    assert of_memory(16 * GIB, 4 * GIB).level == "ok"
    assert of_memory(16 * GIB, 15 * GIB).level == "advice"
    assert (
        of_memory(16 * GIB, 4 * GIB, limited=True).what == "12.0 of 16.0 GiB, the limit of this container, are free"
    )


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_shared_memory(tmp_path).level == "ok"
    monkeypatch.setattr(limits, "LITTLE_SHARED", 1 << 60)
    assert of_shared_memory(tmp_path).level == "advice"
    assert "--shm-size" in of_shared_memory(tmp_path).todo
    monkeypatch.setattr(limits, "NO_SHARED", 1 << 60)
    assert of_shared_memory(tmp_path).level == "fault"
    assert of_shared_memory(tmp_path / "none").level == "fault"


@pytest.mark.parametrize(
    ("limit", "level"), [(64, "fault"), (1024, "advice"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_open_files(limit: int, level: str) -> None:
    assert of_files(limit).level == level
