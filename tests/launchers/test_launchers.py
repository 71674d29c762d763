from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from duoka import launchers as package
from duoka.launchers import LAUNCHERS, launch
from duoka.planning.plan import Plan
from tests.launchers.made import CPU, plan


@pytest.mark.parametrize(("module", "function"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_every_launcher_is_there(module: str, function: str) -> None:
    assert callable(getattr(import_module(module), function))


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

    module, function = LAUNCHERS[name]
    monkeypatch.setattr(import_module(module), function, launcher)
    one = plan(**given)
    assert launch(one) == 7
    assert launched == [one]


def test_the_table_is_in_order() -> None:
    assert list(package.LAUNCHERS) == sorted(package.LAUNCHERS)
