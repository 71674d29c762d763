from __future__ import annotations

import os
from pathlib import Path

from duoka.watching.record import LONGEST, MOST_REPORTS, PublishedRun, open_board, published_runs
from tests.launchers.made import plan


def test_a_run_is_found_and_its_board_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "runtime"
    run = PublishedRun(plan(), folder)
    board = run.begin(0, range(2))
    run.started([1, 2])
    (found,) = published_runs(folder)
    assert (found.pid, found.name, found.pids, found.attempt) == (os.getpid(), "train.py", (1, 2), 0)
    assert (folder.stat().st_mode & 0o777, next(folder.iterdir()).stat().st_mode & 0o777) == (0o700, 0o600)

    board.slot(1).step(7)
    board.slot(1).load(2_000_000, 64, 1, 0)
    board.slot(1).show_rows(24, 0.5)
    board.slot(1).show_rows(16)
    seen = open_board(found)
    assert seen is not None
    assert seen.counters(0).steps == 0
    assert seen.counters(1) == (7, 0.0, 0.002, 64, 16, 0.5)
    board.slot(1).step(8)
    assert seen.counters(1).steps == 8

    run.failed("rank 1 was killed")
    other = run.begin(1, range(2))
    run.started([3, 4])
    other.slot(0).step(1)
    (found,) = published_runs(folder)
    assert (found.attempt, found.faults, found.pids) == (1, ("rank 1 was killed",), (3, 4))
    seen = open_board(found)
    assert seen is not None
    assert [seen.counters(rank).steps for rank in range(2)] == [1, 0]

    run.close()
    assert list(published_runs(folder)) == []
    assert list(folder.iterdir()) == []


def test_the_file_of_a_dead_run_is_removed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        PublishedRun(plan(), tmp_path)
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.iterdir())) == 1
    assert list(published_runs(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_the_script_forked_keeps_the_record(tmp_path: Path) -> None:
    run = PublishedRun(plan(), tmp_path)
    pid = os.fork()
    if pid == 0:
        run.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(published_runs(tmp_path))) == 1
    run.close()


def test_however_often_a_run_fails_its_file_can_be_read(tmp_path: Path) -> None:
    run = PublishedRun(plan(), tmp_path)
    for number in range(200):
        run.failed(f"fault {number}", f"report {number}" + "x" * LONGEST)
    (found,) = published_runs(tmp_path)
    assert (len(found.faults), len(found.reports)) == (200, 200)
    assert [bool(one) for one in found.reports] == [False] * (200 - MOST_REPORTS) + [True] * MOST_REPORTS
    run.close()


def test_where_no_file_can_be_written_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = PublishedRun(plan(), tmp_path / "file")
    run.begin(0, range(1)).slot(0).step(1)
    run.started([1])
    run.close()


def test_a_file_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    run = PublishedRun(plan(), tmp_path)
    next(tmp_path.iterdir()).write_text('{"pid": 1')
    assert list(published_runs(tmp_path)) == []
    assert len(list(tmp_path.iterdir())) == 1
    run.close()
