from __future__ import annotations

import math
from dataclasses import replace

import pytest

from duoka.proving.bounds import OF_MOVE, TIMES, ULPS, Bound, judge, meets
from duoka.proving.comparing import Gap, RunComparison
from duoka.proving.data import DataGap

EPSILON = 2.0**-23
GAP = Gap(step=2, name="w", largest=1e-3, size=1.0, moved=0.1, epsilon=EPSILON)


def comparison(*gaps: Gap, steps: tuple[int, int] = (3, 3), data: DataGap | None = None) -> RunComparison:
    return RunComparison(gaps, steps, data, ((), ()))


def gap(largest: float, step: int = 2, name: str = "w") -> Gap:
    return replace(GAP, largest=largest, step=step, name=name)


def test_what_storing_and_adding_round_away() -> None:
    bound = Bound([])
    assert bound.allowed(GAP) == max(ULPS * EPSILON, OF_MOVE * 0.1)
    assert bound.allowed(replace(GAP, moved=0.0)) == ULPS * EPSILON
    assert judge(comparison(gap(0.9 * OF_MOVE * 0.1)), bound).verdict == "rounding"
    assert judge(comparison(gap(1.1 * OF_MOVE * 0.1)), bound).verdict == "different"


def test_what_a_reference_run_shows_is_rounding_from_then_on() -> None:
    bound = Bound([comparison(gap(1e-2)), comparison(gap(2e-2, name="other"), gap(5e-2, step=3))])
    assert bound.allowed(gap(0, step=1)) == Bound([]).allowed(GAP)
    assert bound.allowed(gap(0, step=2)) == TIMES * 1e-2
    assert bound.allowed(gap(0, step=3)) == TIMES * 5e-2
    assert bound.allowed(gap(0, step=9)) == TIMES * 5e-2
    assert bound.allowed(gap(0, name="third")) == Bound([]).allowed(GAP)


def test_whole_numbers_are_equal_or_not() -> None:
    counter = replace(GAP, largest=1.0, epsilon=0.0)
    assert judge(comparison(counter), Bound([])).verdict == "different"
    assert judge(comparison(counter), Bound([comparison(counter)])).verdict == "rounding"


def test_the_first_place_is_the_first_beyond_rounding() -> None:
    gaps = (gap(1e-9, step=1), gap(1e-9, name="v"), gap(0.5), gap(math.inf, step=3, name="v"))
    judged = judge(comparison(*gaps), Bound([]))
    assert (judged.verdict, judged.parts, judged.first, judged.worst) == ("different", gaps[0], gaps[2], gaps[3])
    assert judged.allowed == OF_MOVE * 0.1


def test_not_a_number_is_beyond_any_bound() -> None:
    assert judge(comparison(gap(math.inf)), Bound([comparison(gap(1.0))])).verdict == "different"


@pytest.mark.parametrize(
    "found",
    [
        comparison(steps=(3, 2)),
        comparison(data=DataGap(1, "order", "another order")),
        comparison(Gap(1, "w", math.inf, math.inf, 0.0, 0.0, "is in the first run only")),
    ],
)
def test_what_is_no_number_is_no_rounding(found: RunComparison) -> None:
    judged = judge(found, Bound([]))
    assert judged.verdict == "different"
    assert judged.why or judged.first


def test_arguments_of_models_may_be_computed() -> None:
    found = comparison(gap(1e-9), data=DataGap(1, "samples", "others", counts=False))
    assert judge(found, Bound([])).verdict == "rounding"
    assert judge(replace(found, gaps=()), Bound([])).verdict == "bits"


def test_a_script_that_amplifies_rounding_is_found() -> None:
    by_hand, grown = gap(1e-7, step=0), gap(0.05)
    assert Bound([comparison(by_hand, grown)]).amplified == grown
    assert Bound([comparison(by_hand, gap(1e-4))]).amplified is None
    coarse = gap(0.04, step=0)  # a move in the last place of a coarse type
    assert Bound([comparison(coarse, gap(0.05))]).amplified is None


def test_which_verdict_meets_which_wish() -> None:
    rounding = judge(comparison(gap(1e-9)), Bound([]))
    assert meets(rounding, "rounding")
    assert not meets(rounding, "bits")
    assert meets(judge(comparison(), Bound([])), "bits")
