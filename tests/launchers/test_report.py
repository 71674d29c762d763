from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from duoka.launchers.hangs import Stuck
from duoka.launchers.processes import Outputs
from duoka.launchers.report import ReportContext, report
from duoka.launchers.verdict import MachineResult, Verdict, judge
from duoka.launchers.workers import Worker
from duoka.planning.options import Machines
from duoka.supervision.status_board import AT_END, CollectiveMismatch, StatusBoard
from tests.launchers.made import CPU, ending, lost, plan, raised, worker

HOST = os.uname().nodename
ENDED: dict[str, Any] = {"status": -15, "signalled_at": 9.0}

Tell = Callable[..., list[str]]


@pytest.fixture
def board() -> StatusBoard:
    return StatusBoard.create(3)


@pytest.fixture
def outputs() -> Iterator[Outputs]:
    outputs = Outputs(None, range(1, 3))
    yield outputs
    outputs.close()


@pytest.fixture
def tell(board: StatusBoard, outputs: Outputs) -> Tell:
    """The lines that are told of some workers' end."""

    def tell(*workers: Worker, stuck: Stuck | None = None, verbose: bool = False) -> list[str]:
        one = plan(devices=(CPU,) * 3, timeout=3.0, verbosity="verbose" if verbose else "normal")
        return report(judge(workers, stuck, None), ReportContext(one, board, workers, outputs)).splitlines()

    return tell


def step(board: StatusBoard, rank: int, text: str, leave: bool = True) -> None:
    slot = board.slot(rank)
    slot.begin_collective(hash(text), text)
    if leave:
        slot.end_collective()


def test_nothing_is_told_of_a_run_that_ended_well(tell: Tell) -> None:
    assert tell(worker(0, ending(0), 0), worker(1, ending(1), 0)) == []


def test_an_error_and_its_rank(tell: Tell) -> None:
    assert tell(worker(0, **ENDED), worker(1, raised(1), 1), worker(2, lost(2), 1)) == [
        "Traceback of rank 1",
        "ValueError: boom",
        f"duoka: raised on rank 1 of 3 ({HOST}); the other ranks were ended",
        "  rank 2: lost the connection to rank 1 (--verbose shows it)",
    ]


def test_an_error_that_only_a_script_s_own_hook_shows(tell: Tell) -> None:
    first = tell(worker(0, **ENDED), worker(1, raised(1, shown=True), 1))[0]
    assert first == f"duoka: raised on rank 1 of 2 ({HOST}); the other rank was ended"


def test_another_error_is_one_line(tell: Tell) -> None:
    lines = tell(worker(0, raised(0, "KeyError: 'x'", time=2), 1), worker(1, raised(1), 1), worker(2, **ENDED))
    assert lines[-1] == "  rank 0: KeyError: 'x' (--verbose shows it)"


def test_verbose_shows_all_with_duoka_s_own_frames(tell: Tell) -> None:
    lines = tell(worker(0, lost(0), 1), worker(1, raised(1), 1), verbose=True)
    assert lines == [
        "whole Traceback of rank 1",
        "ValueError: boom",
        f"duoka: raised on rank 1 of 2 ({HOST}); the other rank was ended",
        "duoka: rank 0 ended with",
        "whole Traceback of rank 0",
        "RuntimeError: Connection closed by peer",
    ]


def test_what_all_ranks_raised_is_shown_once_and_alone(tell: Tell) -> None:
    assert tell(*(worker(rank, raised(rank, trace="the same\n"), 1) for rank in range(3))) == ["the same"]


def test_what_all_ranks_say_at_exit_is_said_once(tell: Tell) -> None:
    assert tell(*(worker(rank, ending(rank, "exited", 1, said="sorry"), 1) for rank in range(3))) == ["sorry"]


def test_the_place_is_told_where_the_board_knows_it(board: StatusBoard, tell: Tell) -> None:
    step(board, 1, "all_reduce (3,) float32 at train.py:41")
    inside = f"duoka: rank 1 of 2 exited with code 3 ({HOST}), in step 1, after all_reduce 1 at train.py:41; "
    lines = tell(worker(0, **ENDED), worker(1, ending(1, "exited", 3), 3))
    assert lines == [f"{inside}the other rank was ended"]
    step(board, 1, "broadcast (3,) float32 at train.py:50", leave=False)
    lines = tell(worker(0, **ENDED), worker(1, ending(1, "exited", 3), 3))
    assert ", in broadcast 2 at train.py:50; " in lines[0]


def test_a_number_is_told_where_the_text_is_forgotten_or_odd(board: StatusBoard, tell: Tell) -> None:
    for _ in range(1204):
        step(board, 1, "barrier")
    assert ", after barrier 1,204; " in tell(worker(0, **ENDED), worker(1, None, 3))[0]


def test_a_death(outputs: Outputs, tell: Tell) -> None:
    file = outputs.files.get(1)
    assert file is not None
    for number in range(100):
        os.write(file.fileno(), b"line %d\n" % number)
    lines = tell(worker(0, **ENDED), worker(1, None, -9))
    logs = lines[0].rpartition("logs: ")[2]
    assert lines == [
        "duoka: rank 1 of 2 ended by SIGKILL, sent by somebody or by the kernel when memory ran out "
        f"({HOST}); the other rank was ended; logs: {logs}",
        "  the end of rank 1's log:",
        *(f"    line {number}" for number in range(95, 100)),
    ]
    kept = Path(logs) / "rank1.log"
    assert kept.read_text().count("\n") == 100
    kept.unlink()
    kept.parent.rmdir()


def test_a_crash_shows_its_stack(tell: Tell) -> None:
    stacks = os.memfd_create("stacks")
    os.write(stacks, b'Current thread 0x1 (most recent call first):\n  File "/a/train.py", line 3 in f\n')
    lines = tell(worker(0, **ENDED), worker(1, None, -11, stacks=stacks))
    os.close(stacks)
    assert lines[1:] == [
        "  it was at (innermost first):",
        '    File "/a/train.py", line 3 in f',
    ]


def test_a_death_after_the_end(tell: Tell) -> None:
    assert "ended by SIGABRT after its script had ended" in tell(worker(0, **ENDED), worker(1, ending(1), -6))[0]


def test_an_exit_that_python_did_not_see(tell: Tell) -> None:
    line = tell(worker(0, **ENDED), worker(1, None, 5))[0]
    assert "rank 1 of 2 exited with code 5 without ending python, as by os._exit" in line


def test_a_rank_that_left(board: StatusBoard, tell: Tell) -> None:
    for rank in range(3):
        step(board, rank, "all_reduce (3,) float32 at train.py:41")
    for rank in (0, 2):
        step(board, rank, "all_reduce (3,) float32 at train.py:42", leave=False)
    workers = worker(0, lost(0), 1), worker(1, ending(1), 0), worker(2, lost(2), 1)
    assert tell(*workers) == [
        f"duoka: rank 1 of 3 ({HOST}) left after all_reduce 1 at train.py:41: the script ended there, while "
        "ranks 0 and 2 waited in all_reduce 2 at train.py:42; the other ranks were ended",
        "  ranks 0 and 2: lost the connection to rank 1 (--verbose shows it)",
    ]


def test_a_rank_that_left_without_a_board(tell: Tell) -> None:
    line = tell(worker(0, lost(0), 1), worker(1, ending(1), 0))[0]
    assert line.startswith(f"duoka: rank 1 of 2 ({HOST}) left: the script ended there, while rank 0 went on; ")


def test_a_rank_that_does_not_come(board: StatusBoard, tell: Tell) -> None:
    for rank in range(3):
        step(board, rank, "all_reduce (3,) float32 at train.py:38")
    for rank in (0, 2):
        step(board, rank, "all_reduce (3,) float32 at train.py:41", leave=False)
    stack = 'Current thread 0x1 (most recent call first):\n  File "/a/train.py", line 50 in step\n'
    stuck = Stuck(2, 3.2, (0, 2), (1,), limit=3.0, stacks={1: stack}, asleep=(1,))
    lines = tell(worker(0, lost(0), 1), worker(1, **ENDED), worker(2, **ENDED), stuck=stuck)
    logs = Path(lines[0].rpartition("logs: ")[2])
    assert lines == [
        f"duoka: rank 1 of 3 ({HOST}) in step 1 has not joined all_reduce 2 at train.py:41; it is in train.py:50, "
        f"asleep; ranks 0 and 2 have waited for 3 s (the limit is 3 s); the run was ended; logs: {logs}",
        "  rank 1 is after all_reduce 1 at train.py:38 and is at (innermost first):",
        '    File "/a/train.py", line 50 in step',
    ]
    assert (logs / "rank1.stacks").read_text() == stack
    (logs / "rank1.stacks").unlink()
    logs.rmdir()


@pytest.mark.parametrize(
    ("odd", "words"),
    [({1: "is stopped (SIGSTOP)"}, "is stopped (SIGSTOP)"), ({}, "does not answer when it is asked")],
)
def test_a_rank_that_does_not_answer(board: StatusBoard, tell: Tell, odd: dict[int, str], words: str) -> None:
    step(board, 0, "barrier", leave=False)
    lines = tell(worker(0, **ENDED), worker(1, **ENDED), stuck=Stuck(1, 3.0, (0,), (1,), odd=odd))
    assert lines[1].startswith(f"  rank 1 {words}")


def test_ranks_that_do_different_things(board: StatusBoard, tell: Tell) -> None:
    step(board, 0, "broadcast at a.py:1", leave=False)
    step(board, 1, "all_reduce at a.py:2", leave=False)
    stuck = Stuck(1, 0.1, (0, 1), (), mismatch=board.mismatch_at(1))
    assert tell(worker(0, **ENDED), worker(1, **ENDED), stuck=stuck)[0] == (
        f"duoka: the ranks called different collectives (number 1): rank 0 of 2 ({HOST}) in step 1 called "
        "broadcast at a.py:1, rank 1 called all_reduce at a.py:2; the run was ended"
    )


def test_a_collective_that_does_not_end(board: StatusBoard, tell: Tell) -> None:
    for rank in (0, 1):
        step(board, rank, "barrier", leave=False)
    lines = tell(worker(0, **ENDED), worker(1, **ENDED), stuck=Stuck(1, 3.0, (0, 1), ()))
    assert lines[0].startswith("duoka: barrier 1 did not end: ranks 0 and 1 have waited for 3 s")


def test_a_rank_that_is_stopped_in_a_collective_is_named_and_not_those_who_wait_for_it(
    board: StatusBoard, tell: Tell
) -> None:
    for rank in (0, 1):
        step(board, rank, "barrier", leave=False)
    stuck = Stuck(1, 3.0, (0, 1), (), odd={1: "is stopped (SIGSTOP)"})
    lines = tell(worker(0, **ENDED), worker(1, **ENDED), stuck=stuck)
    assert lines[0].startswith(
        f"duoka: rank 1 of 2 ({HOST}) in step 1 is stopped (SIGSTOP) in barrier 1; rank 0 has waited for 3 s"
    )
    assert "  rank 1 is stopped (SIGSTOP)" in lines


def test_what_is_raised_at_exit_is_told_where_nobody_saw_it(tell: Tell) -> None:
    trace = "Traceback (most recent call last):\nValueError: late\n"
    well = worker(0, ending(0), 0)
    assert tell(well, worker(1, ending(1), 0, afterwards=trace)) == [
        *trace.splitlines(),
        f"duoka: raised at exit on rank 1 of 2 ({HOST})",
    ]
    both = [worker(rank, ending(rank), 0, afterwards=trace) for rank in range(2)]
    assert tell(*both) == []  # rank 0 has the terminal, where python has shown it


def test_a_rank_whose_script_ended_while_others_went_on_has_left(board: StatusBoard, tell: Tell) -> None:
    for rank in range(3):
        step(board, rank, "all_reduce at train.py:41")
        board.slot(rank).step(1)
    for rank in range(3):
        step(board, rank, f"all_reduce at {AT_END}" if rank == 1 else "all_reduce at train.py:42", leave=False)
    stuck = Stuck(2, 0.1, (0, 1, 2), (), mismatch=board.first_mismatch())
    lines = tell(*(worker(rank, lost(rank), 1) for rank in range(3)), stuck=stuck)
    assert lines == [
        f"duoka: rank 1 of 3 ({HOST}) left in step 2, after all_reduce 1 at train.py:41: the script ended there, "
        "while ranks 0 and 2 waited in all_reduce 2 at train.py:42; the other ranks were ended"
    ]


def test_what_another_machine_tells_is_one_line(board: StatusBoard, outputs: Outputs) -> None:
    elsewhere = MachineResult("raised", 1, "rank 2 raised ValueError: boom (on machine 1 (node2))", fault=True)
    ended = worker(0, lost(0), 1)
    verdict = Verdict("elsewhere", 1, others=(ended,), elsewhere=elsewhere)
    machines = Machines(2, 0, workers=(1, 2), names=("node1", "node2"))
    scene = ReportContext(plan(devices=(CPU,), machines=machines), board, [ended], outputs)
    assert report(verdict, scene).splitlines() == [
        "duoka: rank 2 raised ValueError: boom (on machine 1 (node2)); the run was ended",
        "  rank 0: lost the connection (--verbose shows it)",
    ]


def test_ranks_of_other_machines_are_counted_and_named(board: StatusBoard, outputs: Outputs) -> None:
    machines = Machines(2, 0, workers=(1, 2), names=("node1", "node2"))
    one = plan(devices=(CPU,), machines=machines)
    scene = ReportContext(one, StatusBoard.create(1), [worker(0, **ENDED)], outputs)
    step(scene.board, 0, "barrier at a.py:1", leave=False)

    def told(stuck: Stuck) -> str:
        return report(Verdict("stuck", 1, stuck=stuck), scene).splitlines()[0]

    assert told(Stuck(1, 3.0, (0,), (), limit=3.0, remote=(1, 2))) == (
        "duoka: barrier 1 at a.py:1 did not end: rank 0 has waited for 3 s (the limit is 3 s); "
        "ranks 1 and 2 on machine 1 (node2) have not joined it; the run was ended"
    )
    assert told(Stuck(2, 3.0, (1,), (0,), limit=3.0, text="all_reduce (3,) at a.py:2")).startswith(
        f"duoka: rank 0 of 3 ({HOST}) in step 1 has not joined all_reduce 2 at a.py:2; rank 1 has waited for 3 s"
    )
    mismatch = CollectiveMismatch(1, (((2,), "all_reduce at a.py:2"), ((0,), "barrier at a.py:1")))
    assert "rank 2 of 3" in told(Stuck(1, 0.0, (2, 0), (), mismatch))
