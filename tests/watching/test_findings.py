from __future__ import annotations

from typing import Any

import pytest

from duoka.devices.gpu import Gpu
from duoka.watching.findings import UNEVEN, findings
from duoka.watching.watcher import RunWatcher
from tests.watching.made import record, sample


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
