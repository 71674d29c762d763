from __future__ import annotations

import math

from duoka.supervision.status_board import StatusBoard
from duoka.supervision.value_ring import NAME, RING, LoggedValue, ValueRing


def ring() -> ValueRing:
    values = StatusBoard.create(2).values
    assert values is not None
    return values


def test_values_are_read_in_order() -> None:
    values = ring()
    assert values.since(0) == []
    values.write(3, {"loss": 0.5, "name": "text", "épochs": 2})
    values.write(None, {"loss": math.inf})
    assert values.since(0) == [
        LoggedValue(1, "loss", 3, 0.5),
        LoggedValue(2, "épochs", 3, 2.0),
        LoggedValue(3, "loss", None, math.inf),
    ]
    assert [one.number for one in values.since(2)] == [3]


def test_the_oldest_are_forgotten() -> None:
    values = ring()
    for step in range(RING + 10):
        values.write(step, {"x": step})
    assert [one.step for one in values.since(0)] == list(range(10, RING + 10))


def test_long_names_are_cut() -> None:
    values = ring()
    values.write(0, {"x" * 200: 1.0})
    assert values.since(0)[0].name == "x" * NAME
