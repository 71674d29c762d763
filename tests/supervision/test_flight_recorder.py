from __future__ import annotations

import pickle
import time
from typing import Any

import pytest

from duoka.supervision.flight_recorder import RecorderFollower, RecorderReader
from duoka.supervision.status_board import StatusBoard

FRAMES = [
    {"filename": "/lib/site-packages/torch/distributed/distributed_c10d.py", "line": 1},
    {"filename": "/home/a/train.py", "line": 41},
    {"filename": "/home/a/main.py", "line": 2},
]


def entry(number: int, name: str = "gloo:all_reduce", **given: Any) -> dict[str, Any]:
    usual = {
        "pg_id": 0,
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": name,
        "input_sizes": [[3]],
        "input_dtypes": ["Float"],
        "retired": False,
        "time_created_ns": time.time_ns() - 10**9,
        "frames": FRAMES,
    }
    return usual | given


class Recorder:
    """Stands for torch's: tells counts of the default group, and entries if they are wanted."""

    def __init__(self) -> None:
        self.counts = (-1, -1)
        self.entries: list[dict[str, Any]] = []
        self.asked_for_entries = 0

    def tell(self, entries: bool, stacks: bool, active: bool) -> bytes:
        self.asked_for_entries += entries
        begun, finished = self.counts
        status = {"0": {"last_enqueued_collective": begun, "last_completed_collective": finished}}
        return pickle.dumps({"pg_status": status} | ({"entries": self.entries} if entries else {}))


def test_nothing_is_shown_before_there_is_a_group() -> None:
    assert not RecorderReader(lambda *_: pickle.dumps({"version": "2.10"})).read()
    assert not RecorderReader(Recorder().tell).read()


def test_what_is_there_at_two_looks_is_looked_at_once() -> None:
    recorder = Recorder()
    look = RecorderReader(recorder.tell)
    recorder.counts, recorder.entries = (
        (12, 10),
        [
            entry(9, retired=True),
            entry(11, pg_id=1),
            entry(11),
            entry(12),
        ],
    )
    assert look.read()
    assert (look.begun, look.finished, look.recent) == (12, 10, [])
    for _ in range(3):
        assert look.read()
    before, waited_for, after = look.recent
    assert [before.number, waited_for.number, after.number] == [9, 11, 12]
    assert waited_for.text == "all_reduce (3,) float at train.py:41"
    assert 0.9e9 < time.monotonic_ns() - waited_for.since < 60e9
    assert recorder.asked_for_entries == 1
    recorder.counts = (12, 12)
    assert look.read()
    assert look.recent == []


def test_collectives_that_finish_in_another_order_do_not_count_as_not_finished() -> None:
    """gloo has two threads: 11 finished after 12 and 13."""
    recorder = Recorder()
    look = RecorderReader(recorder.tell)
    recorder.counts = (14, 11)
    recorder.entries = [*(entry(number, retired=True) for number in (11, 12, 13)), entry(14)]
    for _ in range(2):
        assert look.read()
    assert (look.begun, look.finished) == (14, 13)


def test_where_nobody_waits_and_nothing_goes_on_the_last_ones_are_known_too() -> None:
    recorder = Recorder()
    look = RecorderReader(recorder.tell)
    recorder.counts, recorder.entries = (12, 12), [entry(11, retired=True), entry(12, retired=True)]
    assert look.read()
    assert recorder.asked_for_entries == 0
    for _ in range(3):
        assert look.read()
    assert [one.number for one in look.recent] == [11, 12]
    assert recorder.asked_for_entries == 1


@pytest.mark.parametrize(
    ("operation", "one", "other", "equal"),
    [
        ("gather", {"input_sizes": [[3]]}, {"input_sizes": []}, True),
        ("all_reduce", {"input_sizes": [[3, 2]]}, {"input_sizes": [[6]]}, True),
        ("all_reduce", {"input_sizes": [[3]]}, {"input_sizes": [[4]]}, False),
        ("broadcast", {"input_dtypes": ["Float"]}, {"input_dtypes": ["Int"]}, False),
    ],
)
def test_what_differs_among_ranks_by_right_is_not_compared(
    operation: str, one: dict[str, Any], other: dict[str, Any], equal: bool
) -> None:
    digests = []
    for given in (one, other):
        recorder = Recorder()
        recorder.counts, recorder.entries = (1, 0), [entry(1, f"gloo:{operation}", frames=[], **given)]
        look = RecorderReader(recorder.tell)
        look.read()
        look.read()
        digests += [found.digest for found in look.recent]
    assert len(digests) == 2
    assert (digests[0] == digests[1]) == equal


def test_the_making_of_the_group_is_the_first_collective() -> None:
    recorder, board, made = Recorder(), StatusBoard.create(1), []
    follower = RecorderFollower(board.slot(0), [RecorderReader(recorder.tell)], lambda: bool(made))
    follower.look()
    assert board.read(0).begun == 0
    follower.begin_group("train.py:9")
    follower.look()
    assert not board.read(0).waiting
    follower.look()
    progress = board.read(0)
    assert (progress.waiting, progress.number, progress.text) == (True, 1, "init_process_group at train.py:9")
    made.append(True)
    follower.look()
    assert (board.read(0).waiting, board.read(0).begun) == (False, 1)
    recorder.counts, recorder.entries = (5, 4), [entry(5)]
    made.clear()  # a group that is left does not come again
    for _ in range(2):
        follower.look()
    progress = board.read(0)
    assert (progress.waiting, progress.number, progress.text) == (True, 6, "all_reduce (3,) float at train.py:41")
