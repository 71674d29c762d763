from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from duoka.errors import AskedError
from duoka.inference.batches import batches, count_rows, each_leaf, slice_rows, split_rows, stack


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(5)


def numbers(data: object, size: int | None = 2) -> list[list[int]]:
    return [batch.content.tolist() for batch in batches(data, size)]


PAIRS = [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(5),
        numpy.arange(5),
        list(range(5)),
        range(5),
        iter(range(5)),
        (item for item in torch.arange(5)),
        Stream(),
        DataLoader(list(range(5)), batch_size=2),  # type: ignore[arg-type]
    ],
    ids=lambda data: type(data).__name__,
)
def test_every_kind_of_data(data: object) -> None:
    assert numbers(data) == PAIRS


def test_items_that_are_batches_already() -> None:
    assert numbers([torch.arange(2), torch.arange(3)], None) == [[0, 1], [0, 1, 2]]
    assert numbers(iter([torch.arange(2)]), None) == [[0, 1]]
    assert numbers(torch.arange(5), None) == [[0, 1, 2, 3, 4]]


def test_structures() -> None:
    (first, last) = batches({"x": torch.arange(3), "words": ["a", "b", "c"]}, 2)
    assert (first.content["words"], last.content["words"], last.indices) == (["a", "b"], ["c"], range(2, 3))
    (both,) = batches(TensorDataset(torch.arange(2), torch.arange(2)), 2)
    assert [part.tolist() for part in both.content] == [[0, 1], [0, 1]]


def test_nothing_is_nothing() -> None:
    for data in (torch.zeros(0), [], iter([]), numpy.zeros(0)):
        assert list(batches(data, 3)) == []


@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_shares_are_all_of_it_without_overlap(items: int, size: int, ranks: int, lazily: bool) -> None:
    rows = torch.arange(items)
    shares = [list(batches(iter(rows) if lazily else rows, size, (rank, ranks))) for rank in range(ranks)]
    for share in shares:
        assert [batch.indices.start for batch in share] == sorted(batch.indices.start for batch in share)
    found = sorted((batch for share in shares for batch in share), key=lambda batch: batch.indices.start)
    assert [item for batch in found for item in batch.indices] == list(range(items))
    assert all(batch.content.tolist() == list(batch.indices) for batch in found)


# Rows.


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
    assert count_rows(batch) == rows
    parts = [(slice_rows(batch, 0, place, rows), place), (slice_rows(batch, place, rows, rows), rows - place)]
    found = [row for part, size in parts if size for row in split_rows(part, size)]
    whole = split_rows(batch, rows)
    assert len(found) == rows
    assert [str(row) for row in found] == [str(row) for row in whole]


@given(st.integers(1, 6).flatmap(lambda rows: st.tuples(st.just(rows), structures(rows))))
def test_rows_stacked_are_the_batch(drawn: tuple[int, Any]) -> None:
    rows, batch = drawn
    assert str(stack(split_rows(batch, rows))) == str(batch)


def test_structures_are_kept() -> None:
    batch = Pair(torch.arange(2), {"words": ["a", "b"]})
    assert split_rows(batch, 2)[1] == Pair(torch.tensor(1), {"words": "b"})
    assert isinstance(each_leaf(lambda leaf: leaf, batch), Pair)
    assert isinstance(stack(split_rows(batch, 2)), Pair)


def test_what_has_other_rows_stays_whole() -> None:
    table = torch.arange(5)
    assert torch.equal(slice_rows({"x": torch.arange(4), "table": table}, 1, 3, 4)["table"], table)


@pytest.mark.parametrize(
    "output", [torch.tensor(1.0), torch.zeros(3), {"a": torch.zeros(2), "b": torch.zeros(3)}, 7, (0.5, 0.9)]
)
def test_outputs_without_a_row_for_each_item(output: Any) -> None:
    with pytest.raises(AskedError, match="must have one row for each"):
        split_rows(output, 2)


def test_what_cannot_be_stacked_or_counted() -> None:
    with pytest.raises(AskedError, match="differ in shape"):
        stack([torch.zeros(2), torch.zeros(3)])
    assert count_rows(3) is None
    assert count_rows({}) is None
    with pytest.raises(AskedError, match="of type int"):
        split_rows(3, None)
