from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import AskedError
from duoka.inference.rows import count, each_leaf, partition, split, stack


class Pair(NamedTuple):
    first: Any
    second: Any


def tensor(rows: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(rows)).view(-1, *[1] * len(shape)).expand(rows, *shape)


def several(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from("ab"), parts, min_size=1)
    return named | st.lists(parts, min_size=1, max_size=3).map(tuple)


def structures(rows: int) -> st.SearchStrategy[Any]:
    """Return batches of so many rows, of any structure."""
    tensors = st.sampled_from([(), (2,), (3, 2)]).map(lambda shape: tensor(rows, *shape))
    return st.recursive(tensors | st.just([f"word {row}" for row in range(rows)]), several, max_leaves=4)


@given(st.integers(1, 6).flatmap(lambda rows: st.tuples(st.just(rows), structures(rows), st.integers(0, rows))))
def test_parts_of_a_batch_make_up_its_rows(drawn: tuple[int, Any, int]) -> None:
    rows, batch, place = drawn
    assert count(batch) == rows
    parts = [(partition(batch, 0, place, rows), place), (partition(batch, place, rows, rows), rows - place)]
    found = [row for part, size in parts if size for row in split(part, size)]
    whole = split(batch, rows)
    assert len(found) == rows
    assert [str(row) for row in found] == [str(row) for row in whole]


@given(st.integers(1, 6).flatmap(lambda rows: st.tuples(st.just(rows), structures(rows))))
def test_rows_stacked_are_the_batch(drawn: tuple[int, Any]) -> None:
    rows, batch = drawn
    assert str(stack(split(batch, rows))) == str(batch)


def test_structures_are_kept() -> None:
    batch = Pair(torch.arange(2), {"words": ["a", "b"]})
    assert split(batch, 2)[1] == Pair(torch.tensor(1), {"words": "b"})
    assert isinstance(each_leaf(lambda leaf: leaf, batch), Pair)
    assert isinstance(stack(split(batch, 2)), Pair)


def test_what_has_other_rows_stays_whole() -> None:
    table = torch.arange(5)
    assert torch.equal(partition({"x": torch.arange(4), "table": table}, 1, 3, 4)["table"], table)


@pytest.mark.parametrize(
    "output", [torch.tensor(1.0), torch.zeros(3), {"a": torch.zeros(2), "b": torch.zeros(3)}, 7, (0.5, 0.9)]
)
def test_outputs_without_a_row_for_each_item(output: Any) -> None:
    with pytest.raises(AskedError, match="must have one row for each"):
        split(output, 2)


def test_what_cannot_be_stacked_or_counted() -> None:
    with pytest.raises(AskedError, match="differ in shape"):
        stack([torch.zeros(2), torch.zeros(3)])
    assert count(3) is None
    assert count({}) is None
    with pytest.raises(AskedError, match="of type int"):
        split(3, None)
