from __future__ import annotations

from duoka.hardware import machine
from duoka.hardware.inventory import cores


def test_this_machine() -> None:
    here = machine.read()
    assert here.cores == cores()
    assert here.processor
    assert 0 < here.used < here.memory
