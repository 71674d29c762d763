"""Decisions to restart a run; restarts of real processes are in tests/flows/test_restarts.py."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from duoka.checkpoint.preemption import AGAIN as SAVED
from duoka.launchers import restarts
from duoka.launchers.restarts import AGAIN, cause, is_fault, with_restarts
from duoka.launchers.signals import Signals
from duoka.launchers.verdict import Elsewhere, Verdict
from duoka.supervision.ending import Ending
from tests.launchers.made import ending, raised, worker

KILLED = Verdict("died", 137, (worker(1, status=-9),))
WELL = Verdict("well", 0)


def agreed(end: Ending) -> Verdict:
    return Verdict("agreed", end.code, (worker(0, end), worker(1, end)))


@pytest.mark.parametrize(
    ("verdict", "fault"),
    [
        (WELL, False),
        (KILLED, True),
        (Verdict("stopped", 143), False),
        (Verdict("stuck", 1), True),
        (Verdict("left", 1, (worker(0, ending(0)),)), True),
        (agreed(ending(0, "exited", 1)), False),
        (agreed(raised(0)), True),
        (agreed(raised(0, "OptionError: no", code=2)), False),
        (agreed(raised(0, "Refused: no")), False),
        (agreed(raised(0, "KeyboardInterrupt", code=130)), False),
        (agreed(raised(0, "BrokenPipeError: head has read enough")), False),
        (Verdict("agreed", 120, (worker(0, status=120),)), False),
        (agreed(raised(0, "CheckpointError: the disk is full")), True),
        (Verdict("exited", 1, (worker(0, ending(0, "exited", 1)),)), True),
        (Verdict("exited", 75, (worker(0, ending(0, "exited", 75)),)), False),
        (Verdict("exited", 75, (worker(0, status=75),)), True),  # by os._exit: nobody has said that it saved
    ],
)
def test_what_is_a_fault(verdict: Verdict, fault: bool) -> None:
    assert is_fault(verdict) == fault


def test_the_exit_code_of_who_has_saved() -> None:
    assert AGAIN == SAVED


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (KILLED, "rank 1 was killed by SIGKILL"),
        (agreed(raised(0)), "ranks 0 and 1 raised ValueError: boom"),
        (Verdict("left", 1, (worker(2, ending(2)),)), "rank 2 left while others went on"),
        (Verdict("exited", 7, (worker(0, status=7),)), "rank 0 exited with code 7"),
    ],
)
def test_the_cause_in_a_few_words(verdict: Verdict, words: str) -> None:
    assert cause(verdict) == words


class Clock:
    """Stands for time, so that attempts of hours and pauses of minutes take none."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def pause(self, seconds: float, signals: Signals, answered: int) -> None:
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(restarts, "time", clock)
    monkeypatch.setattr(restarts, "_pause", clock.pause)
    return clock


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as signals:
        yield signals


def lives(clock: Clock, *verdicts: tuple[float, Verdict]) -> Callable[[int], Verdict]:
    """Attempts that take so many seconds and end so."""

    def attempt(number: int) -> Verdict:
        seconds, verdict = verdicts[number]
        clock.now += seconds
        return verdict

    return attempt


def test_short_attempts_wait_longer_and_longer(clock: Clock, signals: Signals) -> None:
    told: list[str] = []
    assert with_restarts(lambda number: KILLED, 9, signals, told.append) == 137
    assert clock.pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert told[0] == "duoka: restart 1 of 9 after: rank 1 was killed by SIGKILL\n"
    assert told[1] == (
        "duoka: restart 2 of 9 in 1 s, as the one before failed within 0.1 s, after: rank 1 was killed by SIGKILL\n"
    )
    assert told[-1] == "duoka: all 9 restarts are used up\n"


def test_a_long_attempt_between_short_ones_is_a_new_beginning(clock: Clock, signals: Signals) -> None:
    attempt = lives(clock, (1, KILLED), (1, KILLED), (100, KILLED), (1, KILLED), (100, WELL))
    assert with_restarts(attempt, 9, signals, lambda text: None) == 0
    assert clock.pauses == [0, 1, 0, 0]


def test_without_restarts_nothing_is_said(clock: Clock, signals: Signals) -> None:
    told: list[str] = []
    assert with_restarts(lambda number: KILLED, 0, signals, told.append) == 137
    assert told == []


def test_who_was_asked_to_end_while_a_fault_was_cleared_away_does_not_begin_again(signals: Signals) -> None:
    told: list[str] = []

    def attempt(number: int) -> Verdict:
        assert number == 0
        signals.stops.append(signal.SIGINT)
        return KILLED

    assert with_restarts(attempt, 3, signals, told.append) == 130
    assert told == ["duoka: interrupted\n"]


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1, None])
def test_a_pause_ends_with_a_signal(asked: Any, signals: Signals) -> None:
    signals.for_scripts.append(signal.SIGUSR1)  # one that a script has answered
    if asked:
        signal.raise_signal(asked)
    assert restarts._pause(0.0 if asked is None else 60.0, signals, 1) == asked


def test_a_signal_that_the_script_did_not_take_in_is_no_fault(signals: Signals) -> None:
    ended = Verdict("died", 128 + signal.SIGUSR1, (worker(1, status=-signal.SIGUSR1),))

    def attempt(number: int) -> Verdict:
        assert number == 0
        signals.for_scripts.append(signal.SIGUSR1)
        return ended

    assert with_restarts(attempt, 3, signals, lambda text: None) == 138


def test_the_step_from_which_it_goes_on_is_told(clock: Clock, signals: Signals) -> None:
    told: list[str] = []
    attempt = lives(clock, (9, replace(KILLED, saved=8)), (1, KILLED), (100, WELL))
    assert with_restarts(attempt, 3, signals, told.append) == 0
    assert told[0] == "duoka: restart 1 of 3, from the checkpoint of step 8, after: rank 1 was killed by SIGKILL\n"
    assert told[1].startswith("duoka: restart 2 of 3, from the checkpoint of step 8, in 1 s, as")


@pytest.mark.parametrize("fault", [True, False])
def test_whether_what_another_machine_tells_is_a_fault_that_one_knows(fault: bool) -> None:
    elsewhere = Elsewhere("rank 2 raised ValueError: boom (on machine 1 (node2))", fault)
    verdict = Verdict("elsewhere", 1, elsewhere=elsewhere)
    assert is_fault(verdict) == fault
    assert cause(verdict) == elsewhere.cause
