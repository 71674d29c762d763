from __future__ import annotations

from duoka.supervision.status_board import StatusBoard
from duoka.watching.output_reader import KEPT, MOST_LOGGED, OutputReader


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
