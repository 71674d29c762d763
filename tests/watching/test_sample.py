from __future__ import annotations

import os
import time

import pytest

from duoka.supervision.status_board import StatusBoard
from duoka.watching import sample as module
from duoka.watching.sample import take
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
    assert taken.of(1) is second


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
