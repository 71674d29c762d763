from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from duoka.launchers.local import _record
from duoka.options import Machines
from duoka.supervision.rings import OF_RANK, MachineSamples
from duoka.supervision.status_board import StatusBoard
from duoka.watching.messages import as_message, checked
from duoka.watching.record import PublishedRun, open_board
from duoka.watching.reported import ReportedRun
from duoka.watching.sample import RankSample, take
from tests.launchers.made import plan
from tests.watching.made import record

FULL = RankSample(3, 17, 100.5, "GPU 3", 7, 1.5, 2.5, 640, 3.5, 0.25, 9.0, 1 << 40, "all_reduce (3,) at é.py:1", 0.5)


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
                (2, 5), (2, None), (11, ["x"]),
            ]
        ),
    ],
)  # fmt: skip
def test_other_messages_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not the sample"):
        checked(value, 1)


def test_control_characters_do_not_pass() -> None:
    values = sent(FULL)[0]
    values[11] = "\x1b[31m\ud800" + "x" * 10_000
    text = checked([values], 1)[0][11]
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
