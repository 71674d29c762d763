from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest

from duoka.supervision.rings import LoggedValue
from duoka.watching.history import MOST, MOST_VALUES, SHORTEST, History, Point
from duoka.watching.page import RunEnd, page
from duoka.watching.progress import MOST_LOGGED
from duoka.watching.watcher import RunWatcher
from tests.watching.made import record, sample


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
    assert found.step_times(0, busy_only=False) == [[Point(5.0, 2.0)], [Point(8.0, 0.25)]]
    assert found.step_times(0, busy_only=True) == [[Point(5.0, 1.0)], [Point(8.0, 0.25)]]


def test_mean_parts_and_memory() -> None:
    busy, idle = {"ran": 1.0, "memory": 10}, {"memory": 20}
    found = history([(0.0, {}, {}), (1.0, busy, idle)])
    ((point,),) = found.parts
    assert (point.time, point.parts.computing, point.parts.rest) == (1.0, 0.5, 0.5)
    assert found.memory(1) == [[Point(0.0, 0.0), Point(1.0, 20.0)]]


def test_parts_are_averaged_over_times_in_which_all_ranks_have_a_new_sample() -> None:
    found, second = History(0.0), {"received": 0.0, "ran": 0.0, "time": 70.0}
    found.begin()
    found.add(sample(0.0, {}, {"pid": 0, "time": 0.0}))  # nothing was heard of rank 1 yet
    for time, news in ((1.0, {}), (2.0, {}), (3.0, {"ran": 2.0, "time": 72.0}), (4.0, {}), (5.0, {}), (6.5, {})):
        second |= news
        found.add(sample(time, {"ran": 0.0}, second))
    (points,) = found.parts
    computing = [(point.time, point.seconds, point.parts.computing) for point in points]
    assert computing == [(1.0, 1.0, 0.0), (3.0, 2.0, 0.5), (6.5, 3.5, 0.0)]  # at last it was silent


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
    assert all(point.value == pytest.approx(SHORTEST) for point in found.step_times(0, busy_only=False)[0])


def test_many_names_share_the_room() -> None:
    found = History(0.0)
    rounds, names = 600, [f"grad/{number}" for number in range(MOST_LOGGED)]
    for number in range(rounds):
        found.log(LoggedValue(number * SHORTEST, name, number, float(number)) for name in names)
    kept = [values.all() for values in found.values.values()]
    assert sum(map(len, kept)) < 2 * MOST_VALUES + len(names)
    assert all(values[-1].value == rounds - 1 for values in kept)
    assert min(map(len, kept)) > MOST_VALUES / len(names) / 2
    assert len(page(record(), found, RunEnd(0, rounds * SHORTEST)).encode()) < 5_000_000


@pytest.mark.long
def test_a_day_of_ten_million_steps() -> None:
    """Memory after an hour and after a day; the size of the report. A value is logged every 50 steps."""
    found, watcher = History(0.0), RunWatcher(record())
    found.begin()
    day, steps, logged, traced = 2 * 86_400, 10_000_000, 0, {}
    tracemalloc.start()
    for number in range(day):
        now, done = number * SHORTEST, steps * (number + 1) // day
        found.log(LoggedValue(now, "loss", step, 1 / (step + 1)) for step in range(logged, done, 50))
        logged += len(range(logged, done, 50)) * 50
        one = {"steps": done, "waited": now * 0.3, "ran": now * 0.6, "cpu": now, "memory": 1 << 30}
        taken = sample(now, one, one)
        found.add(taken)
        watcher.add(taken)
        if number + 1 in (2 * 3_600, day):
            gc.collect()
            traced[number + 1] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    hour, end = traced.values()
    found.finish()
    text = page(record(), found, RunEnd(0, day * SHORTEST))
    sizes = [hour, end, len(text.encode())]
    print("after an hour, after a day, report: " + ", ".join(f"{size / 1e6:.2f} MB" for size in sizes))
    assert end < 1.5 * hour
    assert len(text.encode()) < 5_000_000
    assert watcher.state({}).steps == steps


def test_samples_that_are_too_near_are_left_out() -> None:
    found = history([(0.0, {}, {}), (0.1, {"steps": 1}, {}), (0.2, {"steps": 2}, {})])
    assert [one.time for one in found.attempts[0]] == [0.0, 0.2]  # the last one stays
