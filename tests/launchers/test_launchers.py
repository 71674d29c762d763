from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest

from duoka.cli.run import _start
from duoka.planning.plan import Plan
from tests.launchers.made import CPU, plan


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"devices": (CPU,)}, "inline"),
        ({"devices": (CPU, CPU)}, "local"),
        ({"devices": (CPU,), "restarts": 1}, "local"),  # which outlives a worker that is killed
        ({"devices": (CPU, CPU), "self_launching": True}, "inline"),
    ],
)
def test_one_worker_needs_no_other_process(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], name: str) -> None:
    launched: list[Plan] = []

    def launcher(plan: Plan) -> int:
        launched.append(plan)
        return 7

    monkeypatch.setattr(import_module(f"duoka.launchers.{name}"), f"run_{name}", launcher)
    monkeypatch.setattr(os, "_exit", exit)  # without taking down torch, where workers ran the script
    one = plan(**given)
    with pytest.raises(SystemExit, match="7"):
        exit(_start(one))
    assert launched == [one]
