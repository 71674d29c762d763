from __future__ import annotations

from typing import Any

import pytest

from duoka.hardware.gpu import Gpu
from duoka.watching.watcher import UNEVEN, WINDOW, RunState, RunWatcher, findings
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


def found(first: dict[str, Any], second: dict[str, Any], **given: Any) -> list[str]:
    watcher = RunWatcher(record(**given))
    watcher.add(sample(0.0, {}, {}))
    usual = {"steps": 5, "ran": 10.0}
    watcher.add(sample(10.0, usual | first, usual | second))
    return findings(watcher.state({}))


ALONE = "it computes more than the others, or its cores or device are slower; see what else runs there"
SLOW = "waiting for others 30%: rank 1 is the slowest in 100% of readings"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, []),
        ({"waited": 3.0}, {"waited": 3.0}, [f"waiting for others 30%: {UNEVEN}"]),
        (
            {"waited": 6.0},
            {"waited": 0.0},
            [f"{SLOW}: {ALONE}"],
        ),
        (
            {"waited": 6.0},
            {"ran": 5.0, "queued": 3.0},
            [f"{SLOW}, for 30% of its time without a core; see who else uses this machine"],
        ),
        ({"waited": 6.0}, {"ran": 6.0, "loaded": 4.0}, [
            "waiting for data 40%: the loader is the limit; raise num_workers of the DataLoader",
            f"{SLOW}, with 40% of its time in its loader",
        ]),
        (
            {"inside": "all_reduce (3,) float32 at train.py:41", "since": 12.0, "waited": 9.0},
            {},
            ["rank 0 has been in all_reduce (3,) float32 at train.py:41 for 12 s; rank 1 did not call it yet"],
        ),
    ],
)  # fmt: skip
def test_what_stands_out(first: dict[str, Any], second: dict[str, Any], expected: list[str]) -> None:
    assert found(first, second) == expected


def test_ranks_of_other_machines() -> None:
    places: dict[str, Any] = {"workers": (1, 1), "machines": ("machine 0 (a)", "machine 1 (b)"), "pids": (101,)}
    heard = {"received": 9.0}
    text = "waiting for others 30%: rank 1 on machine 1 (b) is the slowest in 100% of readings, with 40% of its time "
    assert f"{text}in its loader" in found({"waited": 6.0}, {"ran": 6.0, "loaded": 4.0, **heard}, **places)
    inside = {"inside": "all_reduce", "since": 12.0}
    stuck = "rank 0 on machine 0 (a) has been in all_reduce for 12 s"
    assert found(inside, heard, **places) == [f"{stuck}; rank 1 on machine 1 (b) did not call it yet"]
    silent = "rank 1 on machine 1 (b): no sample received for 6 s; see whether its machine and its network work"
    assert found(inside, {"received": 4.0}, **places) == [silent, stuck]


def test_a_sleeping_script() -> None:
    asleep, where = {"ran": 4.0}, {"ran": 3.0}
    assert found(asleep, where)[0].startswith("asleep 65%: ")
    assert found(asleep, where)[0].endswith("; `py-spy dump --pid 102` shows where")
    assert found(asleep, where, code=0)[0].endswith("; py-spy shows where")
    assert found({"ran": 4.0, "device": "GPU 0"}, {"ran": 4.0, "device": "GPU 1"}) == []


def test_waits_that_are_not_seen_are_not_explained() -> None:
    assert found({"waited": 6.0}, {"waited": 6.0}, sees_waits=False) == []


def test_a_full_gpu() -> None:
    watcher = RunWatcher(record(1))
    watcher.add(sample(0.0, {"device": "GPU 3"}))
    full, free = (Gpu(3, "GPU-1", "H200", 100, used=used) for used in (96, 50))
    assert findings(watcher.state({"GPU 3": free})) == []
    assert findings(watcher.state({"GPU 3": full})) == [
        "the memory of GPU 3 is nearly full: use a smaller batch, or --strategy fsdp"
    ]


def test_faults() -> None:
    assert found({}, {}, faults=("rank 1 was killed by SIGKILL",)) == ["fault 1: rank 1 was killed by SIGKILL"]
