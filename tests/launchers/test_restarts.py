"""Decisions to restart a run; restarts of real processes are in tests/flows/test_restarts.py."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from duoka.checkpoint.checkpoint import AGAIN as SAVED
from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.inventory import Inventory
from duoka.launchers import restarts
from duoka.launchers.processes import Signals
from duoka.launchers.restarts import AGAIN, cause, is_fault, next_plan, part_to_try, with_restarts
from duoka.launchers.verdict import MachineResult, Verdict
from duoka.planning.options import Machines
from duoka.planning.plan import Kind, Plan
from duoka.supervision.ending import Ending
from tests.launchers.made import ending, plan, raised, worker

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
    elsewhere = MachineResult("raised", 1, "rank 2 raised ValueError: boom (on machine 1 (node2))", fault=fault)
    verdict = Verdict("elsewhere", 1, elsewhere=elsewhere)
    assert is_fault(verdict) == fault
    assert cause(verdict) == elsewhere.cause


GPUS = tuple(Gpu(index, f"GPU-{index}", "RTX 3090", 24 << 30) for index in range(3))
DEVICES = tuple(Device("cuda", gpu.index, gpu.name, gpu.uuid) for gpu in GPUS)
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
BUG = "RuntimeError: CUDA error: an illegal memory access was encountered"


def after(
    made: Plan, error: str, gpus: tuple[Gpu, ...] = GPUS, rank: int = 1, rows: tuple[int, ...] = ()
) -> tuple[Plan, list[str]]:
    told: list[str] = []
    verdict = Verdict("raised", 1, (worker(rank, raised(rank, error)),), rows=rows)
    return next_plan(made, verdict, lambda _: Inventory(gpus, 8, ""), told.append), told


def made(**given: Any) -> Plan:
    return plan(**{"devices": DEVICES, **given})


@pytest.mark.parametrize(
    ("error", "gpus", "lost"),
    [
        (ECC, GPUS, 1),
        (BUG, (*GPUS[:2], replace(GPUS[2], problem="it has fallen off the bus")), 2),
        (BUG, GPUS[1:], 0),
    ],
)
def test_a_lost_device_is_left_out(error: str, gpus: tuple[Gpu, ...], lost: int) -> None:
    found, told = after(made(weights=(1.0, 2.0, 3.0)), error, gpus)
    assert found.devices == DEVICES[:lost] + DEVICES[lost + 1 :]
    assert len(found.weights) == found.workers == 2
    assert told == [f"GPU {lost} (RTX 3090) of rank {lost} is lost, and left out from now on"]


def test_one_device_that_is_left_is_single() -> None:
    given = made(devices=DEVICES[:2], weights=(1.0, 2.0), measures_rows=True)
    found, _ = after(given, ECC)
    assert (found.strategy, found.weights, found.measures_rows) == ("single", (), False)
    exact, _ = after(replace(given, strategy="exact", shares=8), ECC)
    assert (exact.strategy, exact.shares, exact.workers) == ("exact", 8, 1)


def test_a_rank_without_memory_gets_fewer_rows() -> None:
    given = made(measures_rows=True)
    found, told = after(given, MEMORY)
    assert found.weights == (1.0, 0.7, 1.0)
    assert told == ["memory ran out on rank 1: the next attempt begins with --rows 1.43:1:1.43"]
    assert after(found, MEMORY)[0].weights == (1.0, pytest.approx(0.49), 1.0)
    assert after(found, MEMORY, rows=(40, 20, 4))[0].weights == (40, 14, 4)  # shares as they were measured


def test_no_share_is_tried_of_which_the_error_tells_that_it_does_not_fit() -> None:
    said = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 10.00 "
        "GiB of which 1024.00 MiB is free. Of the allocated memory 4.00 GiB is allocated by PyTorch, and 1.00 GiB is "
        "reserved by PyTorch but unallocated."
    )
    assert part_to_try(said) == pytest.approx(0.6)
    assert (part_to_try(MEMORY), part_to_try(BUG)) == (0.7, 0.0)


@pytest.mark.parametrize(
    ("given", "error", "gpus"),
    [
        (made(), BUG, GPUS),
        (made(), BUG, ()),  # the driver does not answer
        (made(weights=(1.0, 2.0, 3.0)), MEMORY, GPUS),  # as the user has said
        (made(kind=Kind.DISTRIBUTED), ECC, GPUS),
        (made(devices=DEVICES[1:2]), ECC, GPUS),
        (made(measures_rows=True, machines=Machines(2, 0, "a", 1)), ECC, GPUS),
    ],
)
def test_else_nothing_changes(given: Plan, error: str, gpus: tuple[Gpu, ...]) -> None:
    assert after(given, error, gpus) == (given, [])
