from __future__ import annotations

import math

import pytest

from duoka.supervision.status_board import StatusBoard
from duoka.watching.progress import KEPT, MOST_LOGGED, OutputReader, numbers_in, read_position


def test_values_that_are_logged_and_printed() -> None:
    output, reader = StatusBoard.create(1).script_output, OutputReader()
    output.log(1, {"loss": 0.51234})
    output.print("Epoch 1, loss 0.51, acc 0.9, found 3 files", redrawn=False)
    assert [(value.name, value.value) for value in reader.read(output)] == [("loss", 0.51234)]
    output.print("\rEpoch 2, loss 0.41, acc 0.95", redrawn=True)
    found = reader.read(output)
    assert [(value.name, value.value) for value in found] == [("acc", 0.9), ("acc", 0.95)]  # printed twice: a value
    assert found[0].time < found[1].time
    assert reader.latest == {"loss": 0.51234, "acc": 0.95}
    assert list(reader.lines) == ["Epoch 1, loss 0.51, acc 0.9, found 3 files"]  # without progress bars
    assert reader.read(output) == []


def test_of_too_many_names_the_first_are_kept() -> None:
    output, reader = StatusBoard.create(1).script_output, OutputReader()
    for step in range(MOST_LOGGED + 9):
        output.log(step, {f"loss of step {step}": 1.0, "loss": 0.5})
        reader.read(output)
    assert len(reader.latest) == MOST_LOGGED
    assert reader.leaves_out
    assert "loss" in reader.latest


def test_after_a_restart() -> None:
    reader = OutputReader()
    for attempt in range(2):
        output = StatusBoard.create(1).script_output
        for number in range(KEPT):
            output.print(f"attempt {attempt} line{number}", redrawn=False)
        reader.restart()
        reader.read(output)
    assert list(reader.lines) == [f"attempt 1 line{number}" for number in range(KEPT)]


LINES = {
    "loss 0.5": {"loss": 0.5},
    "step 200: train loss 4.28, val loss 1e-3": {"step": 200, "train loss": 4.28, "val loss": 1e-3},
    "iter 0: loss 4.2664, time 58.02ms, mfu -100.00%": {"iter": 0, "loss": 4.2664, "time": 58.02, "mfu": -100},
    "Epoch 3/10: acc=91.2%  lr=.5": {"Epoch": 3, "acc": 91.2, "lr": 0.5},
    "Test set: Average loss: 0.2713, Accuracy: 9245/10000 (92%)": {"Average loss": 0.2713, "Accuracy": 9245},
    "{'loss': 0.25, 'grad_norm': 1.5e+2, 'epoch': 0.1}": {"loss": 0.25, "grad_norm": 150, "epoch": 0.1},
    "loss: tensor(0.75, grad_fn=<MeanBackward0>)": {"loss": 0.75},
    "val/loss=2, layer1.weight 3": {"val/loss": 2, "layer1.weight": 3},
    "\x1b[1mloss\x1b[0m 0.5": {"loss": 0.5},
    "损失：0.5": {"损失": 0.5},  # noqa: RUF001
    " 45%|####     | 45/100 [00:04<00:05,  9.93it/s, loss=0.123]": {"loss": 0.123},
    "2026-11-22 19:00:01,123 INFO acc 1.": {"INFO acc": 1},
    "torch 2.13.0 on node1, took 12:30, saved to out/3.pt, port 127.0.0.1": {},
    "loss inf, acc nan": {"loss": math.inf, "acc": math.nan},
    "information about nanometers 5x5": {},
}


@pytest.mark.parametrize("line", LINES)
def test_numbers_of_a_line(line: str) -> None:
    assert dict(numbers_in(line)) == pytest.approx(LINES[line], nan_ok=True)


def test_a_long_line_takes_no_long_time() -> None:
    """A search that tries all cuts of a line would take years."""
    assert list(numbers_in("a b c d e f " * 20_000)) == []
    assert list(numbers_in("a." * 200_000)) == []


EPOCHS = {"done": 2, "count": 10, "begun": 100.0, "first": 0}


def test_nothing_is_known() -> None:
    assert read_position(StatusBoard.create(2), 100.0).words() == ""


def test_a_loader_alone_has_no_time_left() -> None:
    board = StatusBoard.create(2)
    board.slot(0).load(0, 0, 120, 400)
    assert read_position(board, 100.0).words() == "batch 120 of 400"
    board.slot(0).load(0, 0, 1200, 0)
    assert read_position(board, 100.0).words() == "batch 1,200"


@pytest.mark.parametrize(("first", "left", "words"), [(0, 75.0, "1:15"), (2, 7.5 / 0.5 * 25, "6:15")])
def test_epochs(first: int, left: float, words: str) -> None:
    """25 s were taken for 2.5 epochs, or, where the first one seen was the third, for half of one."""
    board = StatusBoard.create(2)
    slot = board.slot(0)
    slot.begin_epoch()
    slot.load(0, 0, 200, 400)
    slot.step(1)
    slot.load(0, 0, 20, 40)  # of an evaluation: it takes the time of the epoch, not its share of it
    board.script_output.show_loops({"epochs": EPOCHS | {"first": first}})
    position = read_position(board, 125.0)
    assert position.left == pytest.approx(left)
    assert position.words() == f"epoch 3 of 10, batch 20 of 40, about {words} left"


def test_before_the_first_step_of_the_loop() -> None:
    board = StatusBoard.create(1)
    board.script_output.show_loops({"epochs": EPOCHS | {"done": 0}})
    assert read_position(board, 125.0).words() == "epoch 1 of 10"


def test_progress_bars() -> None:
    board = StatusBoard.create(1)
    board.slot(0).load(0, 0, 30, 100)
    bars = [{"name": "train", "done": 30, "total": 100, "rate": 2.0}, {"name": "x", "done": 1, "total": 2, "rate": 1}]
    board.script_output.show_loops({"bars": bars})
    assert read_position(board, 0.0).words() == "train 30 of 100, about 0:35 left of this bar"
    board.script_output.show_loops({"bars": [bars[0] | {"rate": None, "name": ""}]})
    assert read_position(board, 0.0).words() == "progress bar 30 of 100"
    board.script_output.show_loops({"bars": bars, "epochs": EPOCHS | {"done": 0}})
    assert (
        read_position(board, 0.0).words() == "epoch 1 of 10, train 30 of 100"
    )  # the time left of the epochs is wanted
