from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, random_split

from duoka.data.splitting import read_in_memory

ROWS = torch.arange(24.0).view(6, 2, 2)
DATA = TensorDataset(ROWS, torch.arange(6), torch.arange(6) % 2 == 0)


def one_by_one(dataset: Any, indices: list[int]) -> Any:
    return default_collate([dataset[index] for index in indices])


def assert_the_same(found: list[Tensor] | None, wanted: list[Tensor]) -> None:
    assert found is not None
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride(), type(one)) == (other.dtype, other.stride(), type(other))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_rows_are_those_that_are_read_one_by_one(indices: list[int]) -> None:
    assert_the_same(read_in_memory(DATA, indices), one_by_one(DATA, indices))
    assert read_in_memory(DATA, [*indices, -1]) is None


@pytest.mark.parametrize(
    "subset",
    [
        Subset(DATA, [4, 0, 5, 2]),
        Subset(DATA, torch.tensor([4, 0, 5, 2])),  # type: ignore[arg-type]
        Subset(Subset(DATA, [5, 4, 3, 2, 1, 0]), range(1, 5)),
        random_split(DATA, [4, 2], torch.Generator().manual_seed(0))[0],
    ],
)
def test_rows_of_a_subset(subset: Subset[Any]) -> None:
    assert_the_same(read_in_memory(subset, [3, 0, 2]), one_by_one(subset, [3, 0, 2]))


class Own(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] * 2


@pytest.mark.parametrize(
    "dataset",
    [
        Own(ROWS),
        TensorDataset(ROWS.clone().requires_grad_()),
        TensorDataset(ROWS.transpose(1, 2)),
        TensorDataset(torch.nn.Parameter(ROWS)),
        [1, 2, 3, 4],
    ],
)
def test_others_are_read_one_by_one(dataset: Any) -> None:
    assert read_in_memory(dataset, [3, 0]) is None


def test_indices_that_are_not_numbers_of_samples_are_left_to_the_dataset() -> None:
    assert read_in_memory(DATA, [0, 6]) is None
    assert read_in_memory(DATA, [torch.tensor(0), torch.tensor(1)]) is None
    assert read_in_memory(DATA, [True, False]) is None


def test_a_replaced_getitem_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: index)
    assert read_in_memory(DATA, [1, 2]) is None


class FromWorker(TensorDataset):
    def __getitems__(self, indices: list[int]) -> Any:
        return [read_in_memory(DATA, indices) is None]


def test_loader_workers_read_one_by_one() -> None:
    loader = DataLoader(FromWorker(ROWS), batch_size=6, num_workers=1, collate_fn=lambda batch: batch)
    assert next(iter(loader)) == [True]
