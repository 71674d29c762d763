from __future__ import annotations

import pytest

from duoka.forecasting.reasons import in_words, is_below_ideal, reasons
from tests.forecasting.made import forecast, run


def test_the_exchange_takes_most_of_the_step() -> None:
    two = run(2, step=0.020, waited=0.014)
    found = forecast(run(1), two)
    assert reasons(found, two) == [
        "14 ms of its 20 ms are waiting for other ranks: the step is too short for the exchange, or the ranks do not "
        "reach it at the same time; use a larger batch, or fewer devices"
    ]


def test_what_weighs_most_comes_first() -> None:
    two = run(2, step=0.030, waited=0.008, whole=0.015, costliest="sort at train.py:7")
    assert reasons(forecast(run(1), two), two) == [
        "15 ms of its 30 ms go into operations that every rank computes whole, most of it sort at train.py:7",
        "8 ms of its 30 ms are waiting for other ranks: the step is too short for the exchange, or the ranks do not "
        "reach it at the same time; use a larger batch, or fewer devices",
    ]


def test_what_is_left_is_what_each_rank_does_by_itself() -> None:
    two = run(2, step=0.011, waited=0.0005)
    (only,) = reasons(forecast(run(1), two), two)
    assert only.startswith("5.5 ms more than its share of one device's step is work that each rank repeats")


def test_cores_that_one_worker_has_already() -> None:
    two = run(2, step=0.009, waited=0.0039, threads=4)
    first, *_ = reasons(forecast(run(1, threads=8), two, cores=8), two)
    assert first == "one worker by itself computes on 8 cores already, and 2 have 8 together"


def test_a_batch_that_cannot_be_shared_out() -> None:
    sixteen = run(16, "cuda", samples=8, step=0.012)
    assert reasons(forecast(run(1, "cuda", samples=8), sixteen), sixteen) == [
        "a batch of 8 over 16 devices is computed whole by each of them"
    ]


def test_of_a_gpu_it_is_not_said_what_is_waited_for() -> None:
    two = run(2, "cuda", step=0.020, waited=0.014)
    assert two.waited is None
    assert reasons(forecast(run(1, "cuda"), two), two) == []


def test_nothing_is_lost() -> None:
    two = run(2, step=0.005, waited=0.001)
    found = forecast(run(1), two)
    assert reasons(found, two) == []
    assert not is_below_ideal(found, two)


def test_of_which_it_is_said_why() -> None:
    runs = [run(1), run(2, step=0.0055), run(4, step=0.004), run(8, step=0.0041)]
    found = forecast(*runs)
    assert [is_below_ideal(found, one) for one in runs] == [False, False, True, True]


@pytest.mark.parametrize(
    ("seconds", "words"), [(12.34, "12.3 s"), (0.0123, "12.3 ms"), (0.00012, "120 µs"), (0.0000456, "45.6 µs")]
)
def test_seconds_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
