from __future__ import annotations

import math
import time

from duoka.supervision.script_output import NAME, TEXT, VALUES, ScriptOutput
from duoka.supervision.status_board import StatusBoard


def output() -> ScriptOutput:
    return StatusBoard.create(2).script_output


def values(output: ScriptOutput, after: int = 0) -> list[tuple[int, str, int | None, float]]:
    return [(number, value.name, value.step, value.value) for number, value in output.logged(after)]


def test_values_are_read_in_order_with_their_times() -> None:
    found = output()
    assert values(found) == []
    begun = time.monotonic()
    found.log(3, {"loss": 0.5, "name": "text", "épochs": 2})
    found.log(None, {"loss": math.inf})
    assert values(found) == [(1, "loss", 3, 0.5), (2, "épochs", 3, 2.0), (3, "loss", None, math.inf)]
    assert values(found, 2) == [(3, "loss", None, math.inf)]
    assert all(begun <= value.time <= time.monotonic() for _, value in found.logged(0))


def test_the_oldest_are_forgotten() -> None:
    found = output()
    for step in range(VALUES + 10):
        found.log(step, {"x": step})
    assert [step for _, _, step, _ in values(found)] == list(range(10, VALUES + 10))


def test_what_is_long_is_cut() -> None:
    found = output()
    found.log(0, {"x" * 200: 1.0})
    found.print("y" * 2000, redrawn=False)
    found.place({"long": "z" * 2000})
    assert values(found) == [(1, "x" * NAME, 0, 1.0)]
    assert [line.text for _, line in found.printed(0)] == ["y" * TEXT]
    assert found.placed() == {}


def test_the_newest_place_counts() -> None:
    found = output()
    assert found.placed() == {}
    found.place({"epoch": 1})
    found.place({"epoch": 2})
    assert found.placed() == {"epoch": 2}
