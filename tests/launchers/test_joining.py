"""The settings that machines compare before a run. Whole runs are in tests/flows/test_machines.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from duoka.launchers import joining as module
from duoka.launchers.joining import join_machines
from duoka.launchers.machines import OtherMachines
from duoka.network.keys import Key
from duoka.planning.plan import Plan
from duoka.script import Target
from tests.launchers.made import plan


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, []),
        ({"batch_norm": "local"}, ["--batch-norm"]),
        ({"threads": 3}, []),
        ({"strategy": "exact", "threads": 3}, ["--strategy", "--threads"]),
        ({"target": Target("train.py", ("x",))}, ["the script's argument list"]),
        ({"timeout": 5.0}, ["--timeout"]),
    ],
)
def test_what_must_be_the_same(
    given: dict[str, Any], what: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import more\n")
    Path("more.py").write_text("x = 1\n")
    assert differing(plan(), plan(**given)) == what


def differing(one: Plan, other: Plan) -> list[str]:
    """The settings by whose digests, which are all that is sent, two plans differ."""
    first, second = (
        module.hello_of(made, Key(b"secret"), module.settings_of(made)).settings for made in (one, other)
    )
    return [name for name in first if first[name] != second[name]]


def test_the_script_s_own_modules_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import more\n")
    Path("more.py").write_text("x = 1\n")
    before = module.settings_of(plan())
    Path("more.py").write_text("x = 2\n")
    after = module.settings_of(plan())
    assert [name for name in before if before[name] != after[name]] == ["the content of more.py"]


def test_one_machine_has_nobody_to_ask() -> None:
    with join_machines(plan(), lambda text: None) as (made, name, others):
        assert made == plan()
        assert len(name) == 16
        assert isinstance(others, OtherMachines)
    assert (others.gloo, others.channel.connections, others.announced_end(), others.progress()) == (
        "lo",
        {},
        None,
        {},
    )


def test_it_is_told_once_and_late_for_whom_a_machine_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    waits = module.report_long_waits(told.append)
    waits("a")
    assert told == []
    monkeypatch.setattr(module, "REPORT_WAIT_AFTER", -1.0)
    for text in ("a", "b", "a"):
        waits(text)
    assert told == ["a", "b"]
