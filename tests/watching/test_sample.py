from __future__ import annotations

import json
import os
import time
from dataclasses import astuple, replace
from typing import Any

import pytest

from duoka.launchers.local import _record
from duoka.planning.options import Machines
from duoka.supervision.rings import OF_RANK, MachineSamples
from duoka.supervision.status_board import StatusBoard
from duoka.watching import sample as module
from duoka.watching.page import ReportedRun
from duoka.watching.record import PublishedRun, open_board, take
from duoka.watching.sample import RankSample, as_message, checked, parts
from tests.launchers.made import plan
from tests.watching.made import record


def test_the_counters_of_this_process() -> None:
    board = StatusBoard.create(2)
    for rank, steps in enumerate((5, 3)):
        board.slot(rank).step(steps)
    board.slot(1).load(2_000_000_000, 64, 1, 0)
    board.slot(1).begin_collective(1, "all_reduce (3,) at train.py:1")
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    taken = take(record(pids=(os.getpid(),) * 2), board)
    assert [one.rank for one in taken.ranks] == [0, 1]
    assert taken.steps == 3
    first, second = taken.ranks
    assert (second.loaded, second.samples, second.inside) == (2.0, 64, "all_reduce (3,) at train.py:1")
    assert second.since >= 0
    assert (first.inside, first.since) == ("", 0.0)
    assert first.ran >= 0.05  # of the main thread
    assert first.cpu >= 0.04  # in ticks of 0.01 s
    assert first.memory > 1 << 20
    assert taken.of_rank(1) is second


@pytest.mark.parametrize("sees_waits", [True, False])
def test_a_long_wait_counts_before_its_end(monkeypatch: pytest.MonkeyPatch, sees_waits: bool) -> None:
    board = StatusBoard.create(1)
    board.slot(0).begin_collective(1, "all_reduce")
    seen = record(ranks=1, pids=(os.getpid(),), sees_waits=sees_waits)
    assert take(seen, board).ranks[0].waited == 0.0
    monkeypatch.setattr(module, "LONG", 0.0)
    (one,) = take(seen, board).ranks
    assert one.since > 0
    assert one.waited == (one.since if sees_waits else 0.0)


def test_a_process_that_has_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    (one,) = take(record(ranks=1, pids=(pid,)), StatusBoard.create(1)).ranks
    assert (one.ran, one.queued, one.cpu, one.memory) == (0.0, 0.0, 0.0, 0)


BEFORE: dict[str, Any] = {"waited": 5.0, "loaded": 3.0, "ran": 40.0, "queued": 1.0}


@pytest.mark.parametrize(
    ("more", "expected"),  # waiting, loading, computing, queued, rest
    [
        ({}, (0, 0, 0, 0, 1)),
        ({"waited": 1, "loaded": 2, "ran": 4, "queued": 0.5}, (0.1, 0.2, 0.4, 0.05, 0.25)),
        ({"waited": 4, "ran": 10}, (0.4, 0, 0.6, 0, 0)),  # it has polled
        ({"loaded": 4, "ran": 5, "queued": 5}, (0, 0.4, 0.5, 0.1, 0)),  # it has loaded itself
        ({"waited": 15, "loaded": 5}, (0.75, 0.25, 0, 0, 0)),  # the wait began before
    ],
)
def test_the_parts_of_ten_seconds(more: dict[str, float], expected: tuple[float, ...]) -> None:
    after = {name: value + more.get(name, 0) for name, value in BEFORE.items()}
    found = parts(RankSample(0, 1, 100.0, **BEFORE), RankSample(0, 1, 110.0, **after))
    assert astuple(found) == pytest.approx(expected)
    assert sum(astuple(found)) == pytest.approx(1)


def test_no_time_has_no_parts() -> None:
    with pytest.raises(ValueError, match="0 s apart"):
        parts(RankSample(0, 1), RankSample(0, 1))


FULL = RankSample(3, 17, 100.5, "GPU 3", 7, 1.5, 2.5, 640, 48, 0.01, 3.5, 0.25, 9.0, 1 << 40, "all_reduce (3,)", 0.5)


def sent(*ranks: RankSample) -> Any:
    return json.loads(json.dumps(as_message(ranks)))


def test_samples_arrive_as_they_were_on_the_board_of_machine_0() -> None:
    board = StatusBoard.create(2, others=(1, 2))
    seen = record(2, pids=(101, 102), workers=(2, 1, 2), machines=("a", "b", "c"))
    board.remote_samples.write(2, MachineSamples(4.0, checked(sent(FULL, FULL), 2)))
    *_, second, third, fourth = take(seen, board).ranks
    assert (second.rank, second.is_known) == (2, False)
    assert [third, fourth] == [replace(FULL, rank=rank, received=4.0) for rank in (3, 4)]


def test_the_largest_sample_has_room() -> None:
    board = StatusBoard.create(1, others=(2,))
    largest = RankSample(1, 1 << 61, *[1.1e18 / 3, "\U0001f600" * 999], inside="\\\U0001f600" * 999, since=1 / 3)
    ranks = checked(sent(largest, largest), 2)
    assert len(json.dumps(ranks, ensure_ascii=False).encode()) < 2 * OF_RANK
    board.remote_samples.write(1, MachineSamples(1.0, ranks))
    found = board.remote_samples.read(1)
    assert found is not None
    assert found.ranks == ranks


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        [[]],
        [1],
        sent(FULL, FULL),
        [sent(FULL)[0][:-1]],
        [[*sent(FULL)[0], 1]],
        *(
            [[*sent(FULL)[0][:at], wrong, *sent(FULL)[0][at + 1 :]]]
            for at, wrong in [
                (0, "1"), (0, -1), (0, 1.5), (0, True), (0, 1 << 63), (0, None), (1, float("nan")), (1, float("inf")),
                (2, 5), (2, None), (13, ["x"]),
            ]
        ),
    ],
)  # fmt: skip
def test_other_messages_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not the sample"):
        checked(value, 1)


def test_control_characters_do_not_pass() -> None:
    values = sent(FULL)[0]
    values[13] = "\x1b[31m\ud800" + "x" * 10_000
    text = checked([values], 1)[0][13]
    assert text.startswith("\\x1b[31m\\ud800xxx")
    assert len(text) == 256


def test_of_commands_that_an_engine_starts_the_first_writes_the_report(tmp_path: Any) -> None:
    for engine, number, reports in (("", 1, True), ("torchrun", 0, True), ("torchrun", 1, False)):
        machines = Machines(2, number, "node1", 1, engine, workers=(2, 2), names=("a", "b"), hosts=("a", "b"))
        run = _record(plan(machines=machines, report=tmp_path / "report.html"), "name")
        assert isinstance(run, ReportedRun) is reports
        assert isinstance(run, PublishedRun)
        assert (run.record.machines, run.record.run) == (("machine 0 (a)", "machine 1 (b)"), "name")
        assert [run.record.machine_of(rank) for rank in (0, 1, 2)] == ["machine 0 (a)"] * 2 + ["machine 1 (b)"]
        run.begin(0, range(2 * number, 2 * number + 2))
        run.started([1, 2])
        board = open_board(run.record)
        assert board is not None
        found = [one.rank for one in take(run.record, board).ranks]
        assert found == ([0, 1, 2, 3] if number == 0 else [2, 3])
        run.close()
