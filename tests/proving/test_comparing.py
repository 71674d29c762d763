from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from duoka.proving import comparing
from duoka.proving.comparing import RunComparison, compare
from tests.proving.recordings import cut, record, weights


def of(folder: Path, first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]) -> RunComparison:
    return compare(record(folder / "first", first), record(folder / "second", second))


def test_the_same_bits(tmp_path: Path) -> None:
    states = [weights(), weights(2.0), weights(2.0), weights(3.0)]
    comparison = of(tmp_path, states, states)
    assert comparison.same_bits
    assert comparison.steps == (3, 3)
    assert (tmp_path / "first/tensors.bin").stat().st_size == 3 * 16  # what has not changed is written once


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
