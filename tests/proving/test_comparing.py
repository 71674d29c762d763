from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from duoka.proving import comparing
from duoka.proving.comparing import OF_MOVE, TIMES, ULPS, Bound, DataGap, Gap, RunComparison, compare, judge, meets
from tests.proving.recordings import cut, record, weights


def of(folder: Path, first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> RunComparison:
    return compare(record(folder / "first", first), record(folder / "second", second))


def test_the_same_bits(tmp_path: Path) -> None:
    states = [weights(), weights(2.0), weights(2.0), weights(3.0)]
    comparison = of(tmp_path, states, states)
    assert comparison.same_bits
    assert comparison.steps == (3, 3)
    assert (tmp_path / "first/tensors.npy").stat().st_size == 3 * (128 + 16)  # what has not changed is written once


def test_the_first_place_and_how_far(tmp_path: Path) -> None:
    comparison = of(tmp_path, [weights(), weights(2.0), weights(3.0)], [weights(), weights(2.5), weights(3.25)])
    first, second = comparison.gaps
    assert (first.step, first.name, first.largest, first.size, first.moved) == (1, "model.weight", 0.5, 2.5, 1.0)
    assert (second.step, second.largest, second.moved) == (2, 0.25, 2.0)
    assert first.relative == 0.2
    assert first.epsilon == 2.0**-23
    assert not comparison.same_bits


def test_not_a_number_is_equal_to_itself_and_to_nothing_else(tmp_path: Path) -> None:
    nan, other = weights(math.nan), weights(-math.nan)
    other["model.weight"][-1:].view(torch.int32)[0] += 1  # another not-a-number
    assert of(tmp_path, [nan], [other]).gaps == ()
    (tmp_path / "more").mkdir()
    assert of(tmp_path / "more", [nan], [weights()]).gaps[0].largest == math.inf


def test_infinite_numbers(tmp_path: Path) -> None:
    assert of(tmp_path, [weights(math.inf)], [weights(math.inf)]).same_bits
    (tmp_path / "more").mkdir()
    assert of(tmp_path / "more", [weights(math.inf)], [weights(-math.inf)]).gaps[0].largest == math.inf


def test_zeros_of_two_signs_are_no_distance_and_other_bits(tmp_path: Path) -> None:
    comparison = of(tmp_path, [weights(0.0)], [weights(-0.0)])
    assert [gap.largest for gap in comparison.gaps] == [0.0]
    assert not comparison.same_bits


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    first = [weights() | {"a": torch.ones(2), "b": torch.ones(3)}]
    second = [weights(count=5) | {"a": torch.ones(2, dtype=torch.float64), "c": torch.ones(3)}]
    problems = {gap.name: gap.problem for gap in of(tmp_path, first, second).gaps}
    assert problems == {
        "model.weight": "is [4] float32 and [5] float32",
        "a": "is [2] float32 and [2] float64",
        "b": "is in the first run only",
        "c": "is in the second run only",
    }


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool]
)
def test_types(tmp_path: Path, dtype: torch.dtype) -> None:
    one = {"it": torch.tensor([0.0, 1.0, 1.0]).to(dtype), "nothing": torch.zeros(0, 3, dtype=dtype)}
    other = {"it": torch.tensor([0.0, 1.0, 0.0]).to(dtype), "nothing": torch.zeros(0, 3, dtype=dtype)}
    comparison = of(tmp_path, [one], [other])
    assert [(gap.name, gap.largest, gap.size) for gap in comparison.gaps] == [("it", 1.0, 1.0)]
    assert (comparison.gaps[0].epsilon > 0) == (dtype.is_floating_point or dtype.is_complex)


@given(
    arrays.arrays(np.float32, 23, elements=st.floats(width=32)),
    arrays.arrays(np.float32, 23, elements=st.floats(width=32)),
)
def test_in_pieces_as_at_once(tmp_path_factory: pytest.TempPathFactory, a: np.ndarray, b: np.ndarray) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    pair = [{"it": torch.from_numpy(a)}], [{"it": torch.from_numpy(b)}]
    whole = of(folder, *pair)
    before, comparing.PIECE = comparing.PIECE, 5
    try:
        (folder / "again").mkdir()
        assert of(folder / "again", *pair).gaps == whole.gaps
    finally:
        comparing.PIECE = before
    with np.errstate(all="ignore"):
        distance = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a.astype(float) - b))
    expected = float(np.nan_to_num(distance, nan=np.inf, posinf=np.inf).max())
    assert max((gap.largest for gap in whole.gaps), default=0.0) == expected


BATCHES = [torch.arange(12.0).reshape(6, 2), torch.arange(12.0, 24.0).reshape(6, 2)]
STATES = [weights(), weights(2.0), weights(3.0)]


def test_ranks_that_share_batches_have_the_same_data(tmp_path: Path) -> None:
    first = record(tmp_path / "first", STATES, BATCHES)
    second = cut(record(tmp_path / "second", STATES, BATCHES), [2, 3, 1])
    assert compare(first, second).data is None


@pytest.mark.parametrize(
    ("other", "kind", "text"),
    [
        (BATCHES[1].flip(0), "order", "the same rows of batch in another order"),
        (BATCHES[1][:4], "rows", "6 and 4 rows in batch"),
        (BATCHES[1] + torch.eye(6)[:, 2:4], "samples", "2 of 6 rows of batch are others, the first in row 2"),
        (BATCHES[1].double(), "rows", "rows of [2] torch.float32 and [2] torch.float64"),
        ([BATCHES[1], 3], "batches", ""),
    ],
    ids=["order", "rows", "samples", "type", "more"],
)
def test_other_data(tmp_path: Path, other: Tensor, kind: str, text: str) -> None:
    first = record(tmp_path / "first", STATES, BATCHES)
    second = record(tmp_path / "second", STATES, [BATCHES[0], other])
    data = compare(first, second).data
    if kind == "batches":
        assert data is not None
        assert (data.step, data.kind) == (2, "values")
        return
    assert data is not None
    assert (data.step, data.kind) == (2, kind)
    assert data.text.startswith(text)


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


def test_which_verdict_meets_which_wish() -> None:
    rounding = judge(comparison(gap(1e-9)), Bound([]))
    assert meets(rounding, "rounding")
    assert not meets(rounding, "bits")
    assert meets(judge(comparison(), Bound([])), "bits")
