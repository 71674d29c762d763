from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from duoka.inference.sources import batches


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
        assert [batch.number for batch in share] == list(range(len(share)))
    found = sorted((batch for share in shares for batch in share), key=lambda batch: batch.indices.start)
    assert [item for batch in found for item in batch.indices] == list(range(items))
    assert all(batch.content.tolist() == list(batch.indices) for batch in found)
