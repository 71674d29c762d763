from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from duoka.launchers.hangs import Stuck
from duoka.launchers.verdict import Doubt, Verdict, agreed, agreement_key, doubt_of, judge, without_agreement
from duoka.launchers.workers import Worker
from duoka.supervision.status_board import CollectiveMismatch
from tests.launchers.made import ending, lost, raised, worker

STUCK = Stuck(number=5, seconds=3.0, waiting=(0,), missing=(1,))


def judged(*workers: Worker, stuck: Stuck | None = None) -> Verdict:
    return judge(workers, stuck, None)


def ranks(workers: Sequence[Worker]) -> list[int]:
    return [worker.rank for worker in workers]


def test_all_well() -> None:
    verdict = judged(worker(0, ending(0), 0), worker(1, ending(1), 0))
    assert (verdict.why, verdict.code) == ("well", 0)


def test_the_first_error_counts() -> None:
    first, second = raised(1, "ValueError: early", time=1.0), raised(0, "ValueError: late", time=2.0)
    verdict = judged(worker(0, second, 1), worker(1, first, 1))
    assert (verdict.why, verdict.code) == ("raised", 1)
    assert (ranks(verdict.culprits), ranks(verdict.others)) == ([1], [0])


def test_an_error_outranks_earlier_noise_of_the_network() -> None:
    verdict = judged(worker(0, lost(0, time=1.0), 1), worker(1, raised(1, time=2.0), 1))
    assert (verdict.why, ranks(verdict.culprits)) == ("raised", [1])


def test_a_death_outranks_earlier_noise_of_the_network() -> None:
    verdict = judged(worker(0, lost(0, time=1.0), 1), worker(1, None, -9, ended_at=2.0))
    assert (verdict.why, verdict.code, ranks(verdict.culprits)) == ("died", 137, [1])


def test_whoever_left_early_is_the_cause_of_noise() -> None:
    verdict = judged(worker(0, lost(0), 1), worker(1, ending(1, "exited"), 0), worker(2, lost(2), 1))
    assert (verdict.why, verdict.code) == ("left", 1)
    assert (ranks(verdict.culprits), ranks(verdict.others)) == ([1], [0, 2])


def test_os_exit_with_0_is_leaving_too() -> None:
    verdict = judged(worker(0, lost(0), 1), worker(1, None, 0))
    assert (verdict.why, ranks(verdict.culprits)) == ("left", [1])


def test_others_that_had_to_be_ended_are_no_cause() -> None:
    verdict = judged(
        worker(0, None, -15, signalled_at=9.0), worker(1, raised(1), 1), worker(2, None, -9, signalled_at=9.0)
    )
    assert (verdict.why, ranks(verdict.culprits), verdict.others) == ("raised", [1], ())


def test_a_rank_that_left_while_the_others_were_ended_waiting() -> None:
    verdict = judged(worker(0, None, -15, signalled_at=9.0), worker(1, ending(1), -9, signalled_at=9.0))
    assert (verdict.why, verdict.code, ranks(verdict.culprits)) == ("left", 1, [1])


def test_noise_alone_is_told_by_the_first_that_heard_it() -> None:
    verdict = judged(worker(0, lost(0, time=2.0), 1), worker(1, lost(1, time=1.0), 1))
    assert (verdict.why, ranks(verdict.culprits), ranks(verdict.others)) == ("raised", [1], [0])


def test_being_stuck_explains_noise_but_not_an_error() -> None:
    assert judged(worker(0, lost(0), 1), worker(1), stuck=STUCK).why == "stuck"
    assert judged(worker(0, raised(0), 1), worker(1), stuck=STUCK).why == "raised"


def test_what_ranks_that_were_stuck_say_to_being_ended_is_no_cause() -> None:
    saved = [worker(rank, ending(rank, "exited", 75, time=9.5), 75, signalled_at=9.0) for rank in range(2)]
    for workers in ([saved[0], worker(1, lost(1, time=9.5), 1, signalled_at=9.0)], saved):
        verdict = judged(*workers, stuck=STUCK)
        assert (verdict.why, verdict.code, verdict.others) == ("stuck", 1, ())


def test_the_same_error_on_all_ranks_is_the_script_s() -> None:
    same = [raised(rank, trace="the same", time=float(rank)) for rank in range(3)]
    verdict = judged(*(worker(rank, one, 1) for rank, one in enumerate(same)))
    assert (verdict.why, verdict.code) == ("agreed", 1)


def test_the_same_error_on_some_ranks_is_theirs() -> None:
    workers = [worker(rank, raised(rank, trace="the same"), 1) for rank in (0, 2)]
    verdict = judged(workers[0], worker(1, None, -15, signalled_at=9.0), workers[1])
    assert (verdict.why, ranks(verdict.culprits)) == ("raised", [0, 2])


@pytest.mark.parametrize(
    "other",
    [
        ending(1, "exited", 4),
        ending(1, "exited", 3, said="else"),
        ending(1, "returned"),
        raised(1),
        None,
    ],
)
def test_ranks_that_end_differently_do_not_agree(other: object) -> None:
    first = worker(0, ending(0, "exited", 3), 3)
    assert not agreed([first, worker(1, other, None)])  # type: ignore[arg-type]
    assert agreed([first, worker(1, ending(1, "exited", 3), 3)])


def test_ranks_that_all_ended_well_or_all_lost_each_other_do_not_agree_on_an_error() -> None:
    assert not agreed([worker(0, ending(0), 0), worker(1, ending(1), 0)])
    same = [raised(rank, trace="t", consequence=True) for rank in range(2)]
    assert not agreed([worker(rank, one, 1) for rank, one in enumerate(same)])


@pytest.mark.parametrize(
    ("end", "status", "why", "code"),
    [
        (ending(1, "exited", 3), 3, "exited", 3),
        (None, 5, "exited", 5),
        (None, -11, "died", 139),
        (ending(1), -6, "died", 134),
        (ending(1), 7, "exited", 7),
        (ending(1, "exited", 3), -9, "exited", 137),
        (raised(1, "KeyboardInterrupt", code=130), 130, "raised", 130),
    ],
)
def test_exit_codes_are_python_s_and_the_shell_s(end: object, status: int, why: str, code: int) -> None:
    others = worker(0, None, -15, signalled_at=9.0)
    verdict = judged(others, worker(1, end, status))  # type: ignore[arg-type]
    assert (verdict.why, verdict.code, ranks(verdict.culprits)) == (why, code, [1])


def test_a_script_that_was_hurried_at_its_end_keeps_its_code() -> None:
    verdict = judged(worker(0, None, -15, signalled_at=9.0), worker(1, ending(1, "exited", 3), -9, signalled_at=9.0))
    assert (verdict.why, verdict.code) == ("exited", 3)


@pytest.mark.parametrize(
    ("end", "status"), [(raised(0, "BrokenPipeError: [Errno 32] Broken pipe"), 1), (ending(0), 120)]
)
def test_a_reader_that_has_enough_is_nobody_s_failure(end: object, status: int) -> None:
    verdict = judged(worker(0, end, status), worker(1, None, -15, signalled_at=9.0))  # type: ignore[arg-type]
    assert (verdict.why, verdict.code) == ("agreed", status)


def test_a_broken_pipe_of_a_rank_that_has_no_reader_is_a_failure() -> None:
    broken = raised(1, "BrokenPipeError: [Errno 32] Broken pipe")
    assert judged(worker(0, None, -15, signalled_at=9.0), worker(1, broken, 1)).why == "raised"


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([(None, -2), (None, -2)], 130),
        ([(raised(0, "KeyboardInterrupt", code=130), 130)] * 2, 130),
        ([(ending(0, "exited", 0), 0)] * 2, 0),
        ([(ending(0, "exited", 4), 4)] * 2, 4),
        ([(ending(0, "exited", 4), 4), (ending(1, "exited", 5), 5)], 130),
        ([(ending(0, "exited", 4), 4), (None, -9)], 130),
        ([(ending(0, "exited", 4), 4), (None, 4)], 130),
        ([(ending(0, "exited", 4), 4), (lost(1), 1)], 4),
        ([(lost(0), 1), (lost(1), 1)], 130),
    ],
)
def test_a_script_s_own_answer_to_a_signal_counts(ends: list[tuple[object, int]], code: int) -> None:
    workers = [worker(rank, end, status) for rank, (end, status) in enumerate(ends)]  # type: ignore[arg-type]
    verdict = judge(workers, None, signal.SIGINT)
    assert (verdict.why, verdict.code) == ("stopped", code)


def test_a_machine_whose_ranks_lost_the_others_does_not_know_the_answer_to_a_signal() -> None:
    verdict = judge([worker(0, lost(0), 1), worker(1, lost(1), 1)], None, signal.SIGTERM)
    assert (verdict.why, verdict.code, doubt_of(verdict)) == ("stopped", 143, Doubt.FOLLOWS)


def test_ranks_that_were_all_told_to_end_saw_nothing_of_the_cause() -> None:
    verdict = judged(worker(0, None, -15, signalled_at=9.0), worker(1, None, -9, signalled_at=9.0))
    assert (verdict.why, verdict.code, verdict.culprits) == ("elsewhere", 1, ())
    assert doubt_of(verdict) is Doubt.NOTHING


def test_what_gloo_ends_is_the_fault_of_ranks_that_parted() -> None:
    parted = Stuck(5, 0.0, (0, 2), (), mismatch=CollectiveMismatch(5, (((0,), "a"), ((2,), "b"))))
    aborted = [worker(rank, None, -signal.SIGABRT) for rank in range(2)]
    assert judged(*aborted, stuck=parted).why == "stuck"
    assert judged(*aborted).why == "died"
    assert judged(aborted[0], worker(1, raised(1), 1), stuck=parted).why == "raised"


@pytest.mark.parametrize(("end", "why"), [(raised(0), "raised"), (ending(0, "exited", 3), "exited")])
def test_all_ranks_of_one_machine_are_not_all(end: object, why: str) -> None:
    verdict = judged(worker(0, end, 1))  # type: ignore[arg-type]
    assert verdict.why == "agreed"
    assert agreement_key(verdict)
    assert (
        without_agreement(verdict).why,
        without_agreement(verdict).code,
        agreement_key(without_agreement(verdict)),
    ) == (why, verdict.code, None)


def test_a_reader_that_has_enough_stays_nobody_s_failure_on_several_machines() -> None:
    verdict = judged(worker(0, raised(0, "BrokenPipeError: [Errno 32] Broken pipe"), 1))
    assert without_agreement(verdict) is verdict


@pytest.mark.parametrize(
    ("workers", "stuck", "doubt"),
    [
        ([worker(0, raised(0), 1)], None, Doubt.NONE),
        ([worker(0, lost(0), 1)], None, Doubt.FOLLOWS),
        ([worker(0, lost(0), 1), worker(1, ending(1), 0)], None, Doubt.LEFT),
        ([worker(0), worker(1)], STUCK, Doubt.NONE),
        ([worker(0), worker(1)], Stuck(5, 3.0, (0, 1), ()), Doubt.FOLLOWS),
    ],
)
def test_how_sure_a_machine_is_that_it_saw_the_cause(
    workers: list[Worker], stuck: Stuck | None, doubt: Doubt
) -> None:
    assert doubt_of(judged(*workers, stuck=stuck)) is doubt
