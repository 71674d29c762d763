from __future__ import annotations

from pathlib import Path

from duoka.devices import machine
from duoka.devices.inventory import cores


def test_this_machine() -> None:
    here = machine.read()
    assert here.cores == cores()
    assert here.processor
    assert 0 < here.used < here.memory


def test_a_containers_limit_is_read(tmp_path: Path) -> None:
    assert machine.memory_limit(tmp_path) == (None, 0)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_limit(tmp_path) == (None, 0)
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("4096\n")
    assert machine.memory_limit(tmp_path) == (1 << 20, 4096)
