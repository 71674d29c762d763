from __future__ import annotations

from duoka.supervision.status_board import StatusBoard
from duoka.watching.hearing import KEPT, MOST_LOGGED, Hearer


def test_values_that_are_logged_and_printed() -> None:
    told, hearer = StatusBoard.create(1).told, Hearer()
    told.log(1, {"loss": 0.51234})
    told.print("Epoch 1, loss 0.51, acc 0.9, found 3 files", redrawn=False)
    assert [(value.name, value.value) for value in hearer.hear(told)] == [("loss", 0.51234)]
    told.print("\rEpoch 2, loss 0.41, acc 0.95", redrawn=True)
    found = hearer.hear(told)
    assert [(value.name, value.value) for value in found] == [("acc", 0.9), ("acc", 0.95)]  # printed twice: a value
    assert found[0].time < found[1].time
    assert hearer.latest == {"loss": 0.51234, "acc": 0.95}
    assert list(hearer.lines) == ["Epoch 1, loss 0.51, acc 0.9, found 3 files"]  # without progress bars
    assert hearer.hear(told) == []


def test_of_too_many_names_the_first_are_kept() -> None:
    told, hearer = StatusBoard.create(1).told, Hearer()
    for step in range(MOST_LOGGED + 9):
        told.log(step, {f"loss of step {step}": 1.0, "loss": 0.5})
        hearer.hear(told)
    assert len(hearer.latest) == MOST_LOGGED
    assert hearer.leaves_out
    assert "loss" in hearer.latest


def test_after_a_restart() -> None:
    hearer = Hearer()
    for attempt in range(2):
        told = StatusBoard.create(1).told
        for number in range(KEPT):
            told.print(f"attempt {attempt} line{number}", redrawn=False)
        hearer.restart()
        hearer.hear(told)
    assert list(hearer.lines) == [f"attempt 1 line{number}" for number in range(KEPT)]
