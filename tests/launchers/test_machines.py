"""What machines agree on. Whole runs are in tests/flows/test_machines.py."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from duoka.board import Board
from duoka.errors import AskedError
from duoka.launchers import machines as module
from duoka.launchers.machines import Alone, Told, agree, choose, device_of, together
from duoka.launchers.verdict import Doubt
from duoka.options import Machines, Target
from tests.launchers.made import plan

WELL, STOPPED = Told("well", 0, ""), Told("stopped", 143, "", Doubt.NOTHING)
RAISED, EXITED = Told("raised", 1, "rank 1 raised"), Told("exited", 3, "rank 2 exited")
LOST = Told("raised", 1, "rank 0 raised PeerLost", Doubt.FOLLOWS)
LEFT = Told("left", 1, "rank 2 left", Doubt.LEFT)
ENDED = Told("elsewhere", 1, "", Doubt.NOTHING)
AGREED = Told("agreed", 3, "rank 0 exited", way="exit 3")


@pytest.mark.parametrize(
    ("told", "silent", "chosen"),
    [
        ({0: WELL, 1: WELL}, [], None),
        ({0: LOST, 1: RAISED}, [], 1),
        ({1: RAISED, 0: EXITED}, [], 1),
        ({0: EXITED, 1: RAISED}, [], 0),
        ({0: LOST, 2: ENDED}, [1], 1),
        ({0: LOST, 2: RAISED}, [1], 2),
        ({0: LOST, 1: WELL}, [], 0),
        ({0: LOST, 1: LEFT}, [], 1),
        ({0: ENDED, 1: LOST}, [], 1),
    ],
)
def test_whose_word_counts(told: dict[int, Told], silent: list[int], chosen: int | None) -> None:
    assert choose(told, silent) == chosen


@pytest.mark.parametrize(
    ("told", "silent", "all_agree"),
    [
        ({0: AGREED, 1: AGREED}, [], True),
        ({0: AGREED, 1: AGREED}, [2], False),
        ({0: AGREED, 1: Told("agreed", 3, "", way="exit 4")}, [], False),
        ({0: AGREED, 1: ENDED}, [], False),
        ({0: WELL, 1: WELL}, [], True),
        ({0: WELL, 1: AGREED}, [], False),
    ],
)
def test_whether_the_ranks_of_all_machines_ended_alike(
    told: dict[int, Told], silent: list[int], all_agree: bool
) -> None:
    assert agree(told, silent) == all_agree


@pytest.mark.parametrize(
    ("codes", "silent", "code"), [([75, 75], [], 75), ([75, 143], [], 143), ([0, 143], [], 143), ([143], [1], 143)]
)
def test_the_exit_code_of_who_was_asked_to_end(codes: list[int], silent: list[int], code: int) -> None:
    told = [Told("stopped", one, "") for one in codes]
    assert module._code_when_stopped(told, silent) == code


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, None),
        ({"batch_norm": "local"}, "--batch-norm is 'whole' on machine 0 (node1), but 'local' on machine 1 (node2)"),
        ({"threads": 3}, None),
        ({"strategy": "exact", "threads": 3}, "--strategy is"),
        ({"target": Target("train.py", ("x",))}, "what the script is given is [] on machine 0 (node1), but ['x'] on"),
        ({"timeout": 5.0}, "--timeout is 600.0 on"),
    ],
)
def test_what_must_be_the_same(
    given: dict[str, Any], what: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import more\n")
    Path("more.py").write_text("x = 1\n")
    facts = [module._facts(one) for one in (plan(), plan(**given))]
    called = Machines(2, 0, names=("node1", "node2")).called
    if what is None:
        module._check_same(facts, called)
    else:
        with pytest.raises(AskedError) as error:
            module._check_same(facts, called)
        assert f"all machines must do the same: {what}" in str(error.value)


def test_the_script_s_own_modules_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import more\n")
    Path("more.py").write_text("x = 1\n")
    before = module._facts(plan())
    Path("more.py").write_text("x = 2\n")
    with pytest.raises(AskedError, match=r"the content of more\.py is '\w{12}' on machine 0"):
        module._check_same([before, module._facts(plan())], Machines(2).called)


def test_how_far_a_rank_is_survives_the_way() -> None:
    board = Board.create(1, 4)
    seat = board.seat(4)
    seat.enter(1, "a")
    seat.leave()
    seat.enter(2, "all_reduce at train.py:7")
    told = module._progress_of(module._told_of(board.read(4)), heard_at=1000.0)
    assert (told.begun, told.finished, told.number, told.text) == (2, 1, 2, "all_reduce at train.py:7")
    assert told.waiting
    assert 999 < told.since <= told.seen == 1000


def test_the_network_device_of_an_address() -> None:
    assert device_of("127.0.0.1") == "lo"
    assert device_of("203.0.113.7") is None
    assert device_of("no address") is None
    assert device_of("::1") == ("lo" if socket.has_dualstack_ipv6() and Path("/proc/net/if_inet6").exists() else None)


def test_one_machine_has_nobody_to_ask() -> None:
    with together(plan(), lambda text: None) as (made, name, others):
        assert made == plan()
        assert len(name) == 16
        assert type(others) is Alone
    assert (others.gloo, others.files, others.alarmed(), others.progress()) == ("lo", (), None, {})


def test_it_is_told_once_and_late_for_whom_a_machine_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    waits = module._patiently(told.append)
    waits("a")
    assert told == []
    monkeypatch.setattr(module, "TO_SAY", -1.0)
    for text in ("a", "b", "a"):
        waits(text)
    assert told == ["a", "b"]
