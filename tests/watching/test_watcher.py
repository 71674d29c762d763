from __future__ import annotations

from typing import Any

import pytest

from duoka.watching.watcher import WINDOW, RunState, RunWatcher
from tests.watching.made import record, sample


def watched(*samples: tuple[float, dict[str, float], dict[str, float]], **given: bool) -> RunState:
    watcher = RunWatcher(record(**given))
    for time, *ranks in samples:
        watcher.add(sample(time, *ranks))
    return watcher.state({})


def test_rates_and_parts() -> None:
    first = {"steps": 10, "samples": 640, "cpu": 1.0}
    last = {"steps": 30, "samples": 1920, "cpu": 5.0, "waited": 1.0, "ran": 2.0}
    state = watched((100.0, first, first), (104.0, last, last | {"waited": 0.0, "ran": 4.0}))
    assert (state.steps, state.steps_per_second, state.samples_per_second) == (30, 5.0, 320.0)
    assert [one.cores for one in state.ranks] == [1.0, 1.0]
    assert [one.parts and one.parts.computing for one in state.ranks] == [0.5, 1.0]
    assert state.waiting == pytest.approx(0.125)


def test_one_look_has_no_rates() -> None:
    state = watched((100.0, {"steps": 3}, {"steps": 2}))
    assert (state.steps, state.steps_per_second, state.samples_per_second) == (2, None, None)
    assert state.ranks[0].parts is None


def test_ranks_with_batches_of_their_own_count_together() -> None:
    state = watched((0.0, {}, {}), (2.0, {"samples": 10}, {"samples": 12}), samples_differ=True)
    assert state.samples_per_second == 11.0


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    looks = [
        (0.0, {"steps": 0}, {"steps": 0}),
        (1.0, {"steps": 1, "waited": 0.6}, {"steps": 1, "waited": 0.1}),
        (2.0, {"steps": 2, "waited": 1.2}, {"steps": 2, "waited": 0.2}),
        (3.0, {"steps": 3, "waited": 1.3}, {"steps": 3, "waited": 0.9}),
        (4.0, {"steps": 4, "waited": 1.4}, {"steps": 4, "waited": 1.0}),
        (5.0, {"steps": 4, "waited": 2.4}, {"steps": 4, "waited": 1.0}),  # no step: nothing is counted
    ]
    assert watched(*looks).slowest == (1, 0.5)
    assert watched(*looks, sees_waits=False).slowest is None


MACHINES: dict[str, Any] = {"workers": (1, 1), "machines": ("machine 0 (a)", "machine 1 (b)")}


def test_a_rank_of_another_machine_is_compared_when_a_new_sample_has_come() -> None:
    watcher = RunWatcher(record(1, **MACHINES))
    unknown: dict[str, Any] = {"pid": 0, "time": 0.0}
    late: dict[str, Any] = {"time": 50.5, "received": 1.1, "waited": 1.0, "ran": 3.0}  # by the clock of its machine
    later = late | {"time": 52.5, "received": 3.1, "steps": 3, "ran": 5.0}
    for time, waited, elsewhere in ((0.0, 0.0, unknown), (1.0, 0.5, unknown), (2.0, 1.0, late), (3.0, 1.5, late)):
        watcher.add(sample(time, {"steps": int(time), "waited": waited}, elsewhere))
    state = watcher.state({})
    assert (state.slowest, state.ranks[1].parts) == (None, None)
    watcher.add(sample(4.0, {"steps": 4, "waited": 2.0}, later))
    state = watcher.state({})
    assert state.slowest == (1, 1.0)  # one reading
    one = state.ranks[1]
    assert (one.machine, one.silent) == ("machine 1 (b)", pytest.approx(0.9))
    assert one.parts is not None
    assert (one.parts.waiting, one.parts.computing) == (0.0, 1.0)


def test_old_looks_are_forgotten() -> None:
    watcher = RunWatcher(record())
    for second in range(100):
        steps = {"steps": second if second < 50 else 50 + 3 * (second - 50)}
        watcher.add(sample(float(second), steps, steps))
    assert watcher.state({}).steps_per_second == 3.0
    assert len(watcher._samples) <= WINDOW + 2
