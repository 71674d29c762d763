from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial

import pytest

from duoka.launchers import hangs as module
from duoka.launchers.hangs import (
    LEAST,
    TO_TELL,
    IdleClock,
    Limits,
    Stuck,
    find_not_exiting,
    find_stuck,
    in_debugger,
    script_frames,
    users_line,
    waiting_for_ended,
)
from duoka.launchers.workers import Worker
from duoka.supervision.status_board import Collective, RankProgress, StatusBoard
from duoka.supervision.tracebacks import OURS
from tests.launchers.made import ending, lost, raised, worker


def come(board: StatusBoard, rank: int, *texts: str, leave: bool = True) -> None:
    slot = board.slot(rank)
    for text in texts:
        slot.begin_collective(hash(text), text)
        if leave:
            slot.end_collective()


def found_stuck(board: StatusBoard, workers: list[Worker], timeout: float) -> Stuck | None:
    return find_stuck(board, workers, Limits(timeout), IdleClock())


def test_nobody_is_stuck_who_is_not_waiting() -> None:
    board = StatusBoard.create(2)
    come(board, 0, "a", "b")
    assert found_stuck(board, [worker(0), worker(1)], timeout=-1) is None


def test_who_waits_and_who_is_missing() -> None:
    board = StatusBoard.create(3)
    for rank in range(3):
        come(board, rank, "a")
    come(board, 0, "b", leave=False)
    come(board, 2, "b", leave=False)
    workers = [worker(rank) for rank in range(3)]
    assert found_stuck(board, workers, timeout=60) is None
    found = found_stuck(board, workers, timeout=0)
    assert found is not None
    assert (found.number, found.waiting, found.missing, found.mismatch) == (2, (0, 2), (1,), None)


def test_of_several_on_their_way_the_first_counts() -> None:
    """A rank that begun more before it waits is not the one to blame the others for."""
    board = StatusBoard.create(2)
    come(board, 0, "a", "b", "c", leave=False)
    come(board, 1, "a", "b", leave=False)
    assert find_stuck(board, [worker(0), worker(1)], Limits(0.0, wait_while_busy=True), IdleClock()) is None


def test_a_rank_that_waits_for_the_same_one_as_others_further_on_is_not_to_blame() -> None:
    """Rank 0 sends to rank 2, which goes on to the next, and to rank 1, which does not take it."""
    board = StatusBoard.create(3)
    for rank in range(3):
        come(board, rank, "a")
    come(board, 0, "b", leave=False)
    come(board, 2, "b")
    come(board, 2, "c", leave=False)
    found = found_stuck(board, [worker(rank) for rank in range(3)], timeout=0)
    assert found is not None
    assert (found.number, found.waiting, found.missing) == (2, (0, 2), (1,))


def test_a_rank_that_computes_with_a_collective_on_its_way_is_missing_in_the_next() -> None:
    board = StatusBoard.create(2)
    come(board, 0, "a", leave=False)
    come(board, 1, "a")
    come(board, 1, "b", leave=False)
    found = found_stuck(board, [worker(0), worker(1)], timeout=0)
    assert found is not None
    assert (found.number, found.waiting, found.missing) == (2, (1,), (0,))


def test_where_all_came_the_network_is_waited_for_unless_one_is_stopped() -> None:
    board = StatusBoard.create(2)
    for rank in range(2):
        come(board, rank, "a", leave=False)
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        workers = [worker(0), worker(1, pid=sleeper.pid)]
        wait_while_busy = Limits(0.0, wait_while_busy=True)
        assert find_stuck(board, workers, wait_while_busy, IdleClock()) is None
        sleeper.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while (found := find_stuck(board, workers, wait_while_busy, IdleClock())) is None:
            assert time.monotonic() < deadline
        assert (found.waiting, found.missing) == ((0, 1), ())
        sleeper.kill()


def test_what_all_came_to_may_take_as_long_as_the_longest_limit() -> None:
    board = StatusBoard.create(2)
    for rank in range(2):
        come(board, rank, "a", leave=False)
    workers = [worker(0), worker(1)]
    assert find_stuck(board, workers, Limits(600.0, step=0.0), IdleClock()) is None
    found = find_stuck(board, workers, Limits(0.0), IdleClock())
    assert found is not None
    assert (found.waiting, found.missing) == ((0, 1), ())


def test_ranks_that_came_to_different_collectives_are_stuck_at_once() -> None:
    board = StatusBoard.create(2)
    come(board, 0, "a", leave=False)
    come(board, 1, "b", leave=False)
    found = found_stuck(board, [worker(0), worker(1)], timeout=600)
    assert found is not None
    assert "rank 0 called a, rank 1 called b" in str(found.mismatch)


def test_who_failed_still_counts_as_waiting_and_who_left_does_not_count() -> None:
    board = StatusBoard.create(3)
    come(board, 0, "a", leave=False)
    workers = [worker(0, lost(0), 1), worker(1), worker(2, ending(2), 0)]
    found = found_stuck(board, workers, timeout=0)
    assert found is not None
    assert (found.waiting, found.missing) == ((0,), (1,))


@pytest.mark.parametrize("text", ["left before it", "left after it"])
def test_waiting_in_vain_for_a_rank_that_left(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(module, "TO_FOLLOW", 0.0)
    board = StatusBoard.create(2)
    come(board, 0, "a", leave=False)
    if text == "left after it":
        come(board, 1, "a")
    assert bool(waiting_for_ended(board, [worker(0), worker(1, ending(1))])) == (text == "left before it")
    assert not waiting_for_ended(board, [worker(0), worker(1)])
    assert not waiting_for_ended(board, [worker(0, raised(0)), worker(1, ending(1))])
    assert os.getpid() == worker(0).pid


@pytest.mark.parametrize(
    ("limits", "steps", "slowest", "expected"),
    [
        (Limits(600.0), 0, 0.0, 600.0),
        (Limits(600.0), 1, 0.0, 600.0),
        (Limits(600.0), 2, 0.1, LEAST),
        (Limits(600.0), 2, 10.0, 200.0),
        (Limits(600.0), 2, 100.0, 600.0),
        (Limits(30.0), 2, 10.0, 30.0),
        (Limits(600.0, 5.0), 0, 0.0, 600.0),
        (Limits(600.0, 5.0), 1, 0.0, 5.0),
    ],
)
def test_the_limit_follows_the_steps(limits: Limits, steps: int, slowest: float, expected: float) -> None:
    assert limits.after(steps, slowest) == expected


@pytest.fixture
def late() -> StatusBoard:
    """Rank 1 has not joined what rank 0 has waited in for 5 minutes, after quick steps."""
    board = StatusBoard.create(2)
    for rank in range(2):
        board.slot(rank).step(1)
        board.slot(rank).step(2)
    board.slot(0).mirror(1, 0, [Collective(1, 1, "a", time.monotonic_ns() - 300 * 10**9)])
    return board


def test_a_rank_that_works_is_waited_for_and_one_that_is_idle_is_not(
    late: StatusBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = iter(range(1000))
    monkeypatch.setattr(module, "work_done", lambda pid: next(work))
    workers, idle_clock = [worker(0), worker(1)], IdleClock()
    assert all(find_stuck(late, workers, Limits(600.0), idle_clock) is None for _ in range(5))
    now = time.monotonic()
    monkeypatch.setattr(module, "work_done", lambda pid: 10**6)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert find_stuck(late, workers, Limits(600.0), idle_clock) is None
    monkeypatch.setattr(time, "monotonic", lambda: now + LEAST / 2)
    found = find_stuck(late, workers, Limits(600.0), idle_clock)
    assert found is not None
    assert (found.missing, found.limit) == ((1,), LEAST)


@pytest.mark.parametrize(
    ("limits", "stuck"),
    [
        (Limits(100.0), True),
        (Limits(100.0, wait_while_busy=True), False),
        (Limits(600.0, 100.0, wait_while_busy=True), True),
    ],
)
def test_beyond_the_longest_limit_only_the_patient_wait(
    late: StatusBoard, monkeypatch: pytest.MonkeyPatch, limits: Limits, stuck: bool
) -> None:
    work = iter(range(1000))
    monkeypatch.setattr(module, "work_done", lambda pid: next(work))
    assert (find_stuck(late, [worker(0), worker(1)], limits, IdleClock()) is not None) == stuck


def test_a_rank_that_works_at_exit_is_waited_for_and_one_that_is_idle_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, work, idle_clock = time.monotonic(), iter(range(1000)), IdleClock()
    workers = [worker(rank, ending(rank, time=now)) for rank in range(2)]
    monkeypatch.setattr(module, "work_done", lambda pid: next(work))
    for seconds in range(0, 1000, 10):
        monkeypatch.setattr(time, "monotonic", partial(float, now + seconds))
        assert find_not_exiting(workers, Limits(100.0), idle_clock) is None
    monkeypatch.setattr(module, "work_done", lambda pid: 10**6)
    assert find_not_exiting(workers, Limits(100.0), idle_clock) is None
    monkeypatch.setattr(time, "monotonic", partial(float, now + 1100))
    found = find_not_exiting(workers, Limits(100.0), idle_clock)
    assert found is not None
    assert found.at_exit


def test_what_was_seen_before_a_rank_left_is_not_waiting_for_it(late: StatusBoard) -> None:
    """The slot of a script that is looked at now and then may be older than the end of another."""
    left = worker(1, ending(1, time=time.monotonic() + 5))
    assert not waiting_for_ended(late, [worker(0), left])
    assert waiting_for_ended(late, [worker(0), worker(1, ending(1))])


def test_a_rank_that_waits_with_the_lock_held_is_seen_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = StatusBoard.create(2)
    for rank in range(2):
        board.slot(rank).mirror(5, 5)
    looked = time.monotonic_ns()
    monkeypatch.setattr(module, "process_state", lambda pid: "S")
    monkeypatch.setattr(time, "monotonic", lambda: looked / 1e9 + 100)
    monkeypatch.setattr("duoka.supervision.status_board.monotonic_ns", lambda: looked + 100 * 10**9)
    board.slot(1).mirror(5, 5)
    workers = [worker(0), worker(1)]
    found = find_stuck(board, workers, Limits(50.0), IdleClock())
    assert found is not None
    assert (found.number, found.waiting, found.missing) == (6, (0,), (1,))
    monkeypatch.setattr(module, "process_state", lambda pid: "R")
    assert find_stuck(board, workers, Limits(50.0), IdleClock()) is None


def far(rank: int, number: int, seconds: float, text: str = "b") -> dict[int, RankProgress]:
    """A rank of another machine, that has waited in a collective for so long; for 0: that has left it."""
    now = time.monotonic()
    return {rank: RankProgress(number, number - bool(seconds), number, text, now - seconds, now, 0, 0.0)}


def test_a_rank_for_which_another_machine_waits_is_missing_here() -> None:
    board = StatusBoard.create(1, 2)
    come(board, 2, "a")
    remote = far(0, 2, seconds=5.0)
    found = find_stuck(board, [worker(2)], Limits(3.0), IdleClock(), remote)
    assert found is not None
    assert (found.waiting, found.missing, found.number, found.text) == ((0,), (2,), 2, "b")
    assert find_stuck(board, [worker(2)], Limits(6.0), IdleClock(), remote) is None


def test_one_that_waits_itself_may_wait_for_another_machine() -> None:
    """Without other machines, the rank that is a collective behind would be to blame."""
    board = StatusBoard.create(2)
    for rank in range(2):
        come(board, rank, "a")
    come(board, 0, "b")
    come(board, 0, "c", leave=False)
    come(board, 1, "b", leave=False)
    workers = [worker(0), worker(1)]
    limits = Limits(600.0, step=-1.0)
    for rank in range(2):
        board.slot(rank).step(1)
    found = find_stuck(board, workers, limits, IdleClock())
    assert found is not None
    assert found.missing == (1,)
    assert find_stuck(board, workers, limits, IdleClock(), far(2, 1, seconds=0)) is None


def test_for_a_rank_of_another_machine_the_longest_limit_holds_and_its_own_is_asked_first() -> None:
    board = StatusBoard.create(2)
    for rank in range(2):
        come(board, rank, "a", leave=False)
    workers = [worker(0), worker(1)]
    assert find_stuck(board, workers, Limits(0.0), IdleClock(), far(2, 0, seconds=0)) is None
    found = find_stuck(board, workers, Limits(-TO_TELL), IdleClock(), far(2, 0, seconds=0))
    assert found is not None
    assert (found.waiting, found.missing, found.remote) == ((0, 1), (), (2,))


def test_ranks_of_machines_that_came_to_different_collectives() -> None:
    board = StatusBoard.create(1)
    come(board, 0, "a")
    come(board, 0, "b", leave=False)
    assert find_stuck(board, [worker(0)], Limits(600.0), IdleClock(), far(1, 2, 0.1)) is None
    found = find_stuck(board, [worker(0)], Limits(600.0), IdleClock(), far(1, 2, 0.1, "c"))
    assert found is not None
    assert str(found.mismatch).endswith("rank 0 called b, rank 1 called c")
    wait_while_busy = Limits(
        600.0, wait_while_busy=True
    )  # a script with ranks of its own may have shapes of its own on each
    assert find_stuck(board, [worker(0)], wait_while_busy, IdleClock(), far(1, 2, 0.1, "c")) is None


def test_who_is_done_is_not_stuck_whoever_waits() -> None:
    board = StatusBoard.create(1)
    assert find_stuck(board, [worker(0, ending(0))], Limits(-1.0), IdleClock(), far(1, 2, 5.0)) is None


DUMP = f"""\
Thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/site-packages/loader.py", line 30 in run

Current thread 0x00007f1 (most recent call first):
  File "/home/me/train.py", line 12 in step
  File "{OURS}plain/modules.py", line 40 in call
  File "/home/me/train.py", line 30 in <module>
  File "{OURS}script/target.py", line 45 in _run_path
  File "{OURS}launchers/worker.py", line 70 in live
  File "/usr/bin/duoka", line 8 in <module>
"""


def test_only_the_script_s_frames_of_its_own_thread() -> None:
    assert script_frames(DUMP) == [
        '  File "/home/me/train.py", line 12 in step',
        '  File "/home/me/train.py", line 30 in <module>',
    ]


def test_a_dump_that_begins_with_a_crash() -> None:
    assert script_frames(f"Fatal Python error: Segmentation fault\n\n{DUMP}") == script_frames(DUMP)


def test_without_the_script_s_thread_the_last_is_taken() -> None:
    assert script_frames(DUMP.partition("\n\n")[0]) == [
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait',
        '  File "/site-packages/loader.py", line 30 in run',
    ]


def test_deep_stacks_are_cut() -> None:
    deep = "Current thread 0x1 (most recent call first):\n" + '  File "/a.py", line 2 in f\n' * 100
    assert len(script_frames(deep, most=8)) == 8


def test_nothing_gives_nothing() -> None:
    assert script_frames("") == []
    assert script_frames("Current thread 0x1 (most recent call first):\n  <no Python frame>\n") == []


def test_the_line_of_the_script_s_own_code() -> None:
    assert users_line(DUMP) == "train.py:12"
    in_library = f'Current thread 0x1 (most recent call first):\n  File "{os.__file__}", line 5 in listdir\n'
    assert users_line(f'{in_library}  File "/home/me/data.py", line 17 in read\n') == "data.py:17"
    assert users_line(in_library) is None


def test_a_debugger_is_seen() -> None:
    assert not in_debugger(DUMP)
    assert in_debugger(DUMP.replace("loader.py", "bdb.py"))
