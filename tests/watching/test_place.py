from __future__ import annotations

import pytest

from duoka.supervision.status_board import StatusBoard
from duoka.watching.place import read_place

EPOCHS = {"place": "train.py:7", "done": 2, "rounds": 10, "begun": 100.0, "first": 0, "ends_early": False}


def test_nothing_is_known() -> None:
    assert read_place(StatusBoard.create(2), 100.0).words() == ""


def test_a_loader_alone_has_no_time_left() -> None:
    board = StatusBoard.create(2)
    board.slot(0).load(0, 0, 120, 400)
    assert read_place(board, 100.0).words() == "batch 120 of 400"
    board.slot(0).load(0, 0, 1200, 0)
    assert read_place(board, 100.0).words() == "batch 1,200"


@pytest.mark.parametrize(
    ("given", "left"), [({}, 75.0), ({"first": 2}, 7.5 / 0.5 * 25), ({"ends_early": True}, 75.0)]
)
def test_epochs(given: dict[str, object], left: float) -> None:
    """25 s were taken for 2.5 epochs, or, where the first one seen was the third, for half of one."""
    board = StatusBoard.create(2)
    slot = board.slot(0)
    slot.begin_epoch()
    slot.load(0, 0, 200, 400)
    slot.step(1)
    slot.load(0, 0, 20, 40)  # of an evaluation: it takes the time of the epoch, not its share of it
    board.script_output.show_loops({"epochs": EPOCHS | given})
    place = read_place(board, 125.0)
    assert place.left == pytest.approx(left)
    about = "at most about" if "ends_early" in given else "about"
    shown = "6:15" if "first" in given else "1:15"
    assert place.words() == f"epoch 3 of 10, batch 20 of 40, {about} {shown} left"


def test_before_the_first_step_of_the_loop() -> None:
    board = StatusBoard.create(1)
    board.script_output.show_loops({"epochs": EPOCHS | {"done": 0}})
    assert read_place(board, 125.0).words() == "epoch 1 of 10"


def test_progress_bars() -> None:
    board = StatusBoard.create(1)
    board.slot(0).load(0, 0, 30, 100)
    bars = [{"name": "train", "done": 30, "total": 100, "rate": 2.0}, {"name": "x", "done": 1, "total": 2, "rate": 1}]
    board.script_output.show_loops({"bars": bars})
    assert read_place(board, 0.0).words() == "train 30 of 100, about 0:35 left of this bar"
    board.script_output.show_loops({"bars": [bars[0] | {"rate": None, "name": ""}]})
    assert read_place(board, 0.0).words() == "progress bar 30 of 100"
    board.script_output.show_loops({"bars": bars, "epochs": EPOCHS | {"done": 0}})
    assert read_place(board, 0.0).words() == "epoch 1 of 10, train 30 of 100"  # the time left of the epochs is wanted
