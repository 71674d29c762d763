from __future__ import annotations

from typing import Any

import pytest

from duoka.supervision.told import LoggedValue
from duoka.watching.history import MOST, SHORTEST, History, Point
from tests.watching.made import sample


def history(*attempts: list[tuple[float, dict[str, Any], dict[str, Any]]]) -> History:
    found = History(0.0)
    for samples in attempts:
        found.begin()
        for time, *ranks in samples:
            found.add(sample(time, *ranks))
    found.finish()
    return found


def test_step_times_with_and_without_waits() -> None:
    found = history(
        [
            (0.0, {}, {}),  # the time before the first step is not one of a step
            (1.0, {"steps": 2, "waited": 0.0}, {"steps": 2}),
            (2.0, {"steps": 2, "waited": 0.5}, {"steps": 2}),  # no step has ended
            (5.0, {"steps": 4, "waited": 2.0}, {"steps": 4}),
        ],
        [(7.0, {"steps": 1}, {"steps": 1}), (8.0, {"steps": 5}, {"steps": 5})],
    )
    assert found.step_times(0, own=False) == [[Point(5.0, 2.0)], [Point(8.0, 0.25)]]
    assert found.step_times(0, own=True) == [[Point(5.0, 1.0)], [Point(8.0, 0.25)]]


def test_mean_parts_and_memory() -> None:
    busy, idle = {"ran": 1.0, "memory": 10}, {"memory": 20}
    found = history([(0.0, {}, {}), (1.0, busy, idle)])
    ((point,),) = found.parts
    assert (point.time, point.parts.computing, point.parts.rest) == (1.0, 0.5, 0.5)
    assert found.memory(1) == [[Point(0.0, 0.0), Point(1.0, 20.0)]]


def test_a_long_run_stays_small_and_keeps_its_ends() -> None:
    found = History(0.0)
    found.begin()
    count = 20 * MOST
    for number in range(count):
        found.add(sample(number * SHORTEST, {"steps": number}, {"steps": number}))
        found.log([LoggedValue(number * SHORTEST, "loss", None, float(number))])
    found.finish()
    (samples,) = found.attempts
    assert MOST / 2 <= len(samples) <= 2 * MOST
    assert len(found.parts[0]) == len(samples) - 1
    assert sum(point.seconds for point in found.parts[0]) == samples[-1].time - samples[0].time
    assert all(point.parts.rest == pytest.approx(1.0) for point in found.parts[0])
    assert (samples[0].steps, samples[-1].steps) == (0, count - 1)
    values = found.values["loss"].all()
    assert MOST / 2 <= len(values) <= 2 * MOST + 1
    assert (values[0].value, values[-1].value) == (0.0, count - 1)
    assert all(point.value == pytest.approx(SHORTEST) for point in found.step_times(0, own=False)[0])


def test_samples_that_are_too_near_are_left_out() -> None:
    found = history([(0.0, {}, {}), (0.1, {"steps": 1}, {}), (0.2, {"steps": 2}, {})])
    assert [one.time for one in found.attempts[0]] == [0.0, 0.2]  # the last one stays
