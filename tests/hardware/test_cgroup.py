from __future__ import annotations

import math
from pathlib import Path

import pytest

from duoka.hardware import machine


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], own: str) -> None:
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "ROOT", tmp_path / "fs")
    monkeypatch.setattr(machine, "OWN", tmp_path / "own")


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({}, "", math.inf),
        ({"cpu.max": "max 100000\n"}, "0::/\n", math.inf),
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
        ({"cpu.max": "nonsense\n"}, "0::/\n", math.inf),
        ({"slurm/job/cpu.max": "300000 100000", "slurm/cpu.max": "max 100000"}, "0::/slurm/job\n", 3),
        ({"slurm/job/cpu.max": "max 100000", "slurm/cpu.max": "200000 100000"}, "0::/slurm/job\n", 2),
        ({"slurm/job/cpu.max": "300000 100000", "cpu.max": "400000 100000"}, "0::/other\n", 4),
        ({"cpu.max": "400000 100000"}, "0::/../../outside\n", 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "", math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n0::/\n", 4),
        (
            {"cpu/job/cpu.cfs_quota_us": "100000\n", "cpu/job/cpu.cfs_period_us": "100000\n"},
            "5:memory:/other\n4:cpu,cpuacct:/job\n",
            1,
        ),
    ],
)
@pytest.mark.usefixtures("groups")
def test_cores(cores: float) -> None:
    assert machine.allowed_cores() == cores


@pytest.mark.parametrize(
    ("files", "own", "memory"),
    [
        ({}, "", (None, 0)),
        ({"memory.max": "max\n", "memory.current": "4096\n"}, "0::/\n", (None, 0)),
        ({"memory.max": "1048576\n", "memory.current": "4096\n"}, "0::/\n", (1 << 20, 4096)),
        (
            {"memory.max": "9000", "memory.current": "5000", "memory.stat": "anon 7\ninactive_file 3000\n"},
            "0::/\n",
            (9000, 2000),
        ),
        (
            {"a/memory.max": "500", "a/memory.current": "50", "a/b/memory.max": "900", "a/b/memory.current": "1"},
            "0::/a/b\n",
            (500, 50),
        ),
        (
            {"memory/job/memory.limit_in_bytes": "700", "memory/job/memory.usage_in_bytes": "70"},
            "5:memory:/job\n4:cpu:/other\n",
            (700, 70),
        ),
    ],
)
@pytest.mark.usefixtures("groups")
def test_memory(memory: tuple[int | None, int]) -> None:
    assert machine.memory_limit() == memory


def test_here() -> None:
    assert machine.allowed_cores() > 0
    limit, used = machine.memory_limit()
    assert limit is None or 0 <= used <= limit
