"""The verdict that machines reach from the results of all. Whole runs are in tests/flows/test_machines.py."""

from __future__ import annotations

import pytest

from duoka.launchers.machines import MachineResult, agree, choose, code_when_stopped, progress_of, serialised
from duoka.launchers.verdict import Doubt
from duoka.supervision.status_board import StatusBoard

WELL, STOPPED = MachineResult("well", 0, ""), MachineResult("stopped", 143, "", Doubt.NOTHING)
RAISED, EXITED = MachineResult("raised", 1, "rank 1 raised"), MachineResult("exited", 3, "rank 2 exited")
LOST = MachineResult("raised", 1, "rank 0 raised PeerLost", Doubt.FOLLOWS)
LEFT = MachineResult("left", 1, "rank 2 left", Doubt.LEFT)
ENDED = MachineResult("elsewhere", 1, "", Doubt.NOTHING)
AGREED = MachineResult("agreed", 3, "rank 0 exited", way="exit 3")


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
def test_whose_word_counts(told: dict[int, MachineResult], silent: list[int], chosen: int | None) -> None:
    assert choose(told, silent) == chosen


@pytest.mark.parametrize(
    ("told", "silent", "all_agree"),
    [
        ({0: AGREED, 1: AGREED}, [], True),
        ({0: AGREED, 1: AGREED}, [2], False),
        ({0: AGREED, 1: MachineResult("agreed", 3, "", way="exit 4")}, [], False),
        ({0: AGREED, 1: ENDED}, [], False),
        ({0: WELL, 1: WELL}, [], True),
        ({0: WELL, 1: AGREED}, [], False),
    ],
)
def test_whether_the_ranks_of_all_machines_ended_alike(
    told: dict[int, MachineResult], silent: list[int], all_agree: bool
) -> None:
    assert agree(told, silent) == all_agree


@pytest.mark.parametrize(
    ("codes", "silent", "code"), [([75, 75], [], 75), ([75, 143], [], 143), ([0, 143], [], 143), ([143], [1], 143)]
)
def test_the_exit_code_of_who_was_asked_to_end(codes: list[int], silent: list[int], code: int) -> None:
    told = [MachineResult("stopped", one, "") for one in codes]
    assert code_when_stopped(told, silent) == code


def test_how_far_a_rank_is_survives_the_way() -> None:
    board = StatusBoard.create(1, 4)
    slot = board.slot(4)
    slot.begin_collective(1, "a")
    slot.end_collective()
    slot.begin_collective(2, "all_reduce at train.py:7")
    told = progress_of(serialised(board.read(4)), received_at=1000.0)
    assert (told.begun, told.finished, told.number, told.text) == (2, 1, 2, "all_reduce at train.py:7")
    assert told.waiting
    assert 999 < told.since <= told.seen == 1000
