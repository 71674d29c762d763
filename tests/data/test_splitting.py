from __future__ import annotations

import gc
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from duoka.data.splitting import Reader, SplitIterator, can_split, is_stacked
from duoka.errors import Refused
from duoka.planning.options import Loading
from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View
from tests.view.ranks import Table, ThreadRanks

Make = Callable[[], "DataLoader[Any]"]
Pair = namedtuple("Pair", "x y")

X = torch.arange(46.0).view(23, 2)
DATA = TensorDataset(X, torch.arange(23))
_own_iterator: Any = DataLoader._get_iterator


class Samples(Dataset[Any]):
    """A dataset whose samples are `make(index)`."""

    def __init__(self, make: Callable[[int], Any], n: int = 23) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Read a loader as one of several ranks; they need no communication, so they run one after the other."""

    def read(
        make: Make, rank: int, world_size: int, epochs: int = 2, loading: Loading = "auto", say: Any = lambda _: None
    ) -> tuple[list[Any], Any]:
        view = View(ThreadRanks(Table(world_size), rank), adopt=lambda leaf: None, say=say)
        readers: WeakKeyDictionary[Any, Reader] = WeakKeyDictionary()

        def get_iterator(self: DataLoader[Any]) -> Any:
            if isinstance(self.dataset, Reader) or not can_split(self, loading):
                return _own_iterator(self)
            if self not in readers:
                readers[self] = Reader(self, Partition(0, rank, world_size), loading)
            return SplitIterator(self, readers[self], view)

        with monkeypatch.context() as patched:
            patched.setattr(DataLoader, "_get_iterator", get_iterator)
            return epochs_of(make, epochs)

    return read


def epochs_of(make: Make, epochs: int = 2) -> tuple[list[Any], Any]:
    """Return the batches of some epochs, and numbers drawn afterwards."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loader = make()
    batches = [batch for _ in range(epochs) for batch in loader]
    return batches, (torch.rand(()).item(), random.random(), np.random.rand())


def assert_rows(found: Any, whole: Any, rank: int, world_size: int) -> None:
    """Check that batch tensors hold this rank's rows, and that other batches are whole."""
    for one, other in zip(tree_leaves(found), tree_leaves(whole), strict=True):
        if isinstance(one, BatchTensor):
            n = len(other)
            own = other[n * rank // world_size : n * (rank + 1) // world_size]
            assert one.shape == other.shape
            assert torch.equal(one.to_local(), own)
        elif isinstance(one, Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def shared_out(batches: list[Any]) -> list[bool]:
    return [isinstance(tree_leaves(batch)[0], BatchTensor) for batch in batches]


def item(index: int) -> dict[str, Any]:
    return {"x": X[index], "more": [index, float(index)], "both": Pair(X[index], np.float32(index))}


LOADERS: dict[str, Make] = {
    "in order": lambda: DataLoader(DATA, 5),
    "shuffled": lambda: DataLoader(DATA, 5, shuffle=True),
    "a generator": lambda: DataLoader(DATA, 5, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "drop_last": lambda: DataLoader(DATA, 5, shuffle=True, drop_last=True),
    "last batch smaller than the ranks": lambda: DataLoader(DATA, 11, shuffle=True),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler(torch.arange(1.0, 24), 17)),
    "subset": lambda: DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(3, 20))),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 6, True)),
    "batches of all sizes": lambda: DataLoader(DATA, batch_sampler=[[3, 1, 2, 9], [4, 4], [7, 8, 9, 10, 11], [0]]),
    "an order drawn when an epoch begins": lambda: DataLoader(DATA, batch_sampler=_DrawnAtOnce(), num_workers=1),
    "dicts and tuples": lambda: DataLoader(Samples(item), 5, shuffle=True),
    "read in batches": lambda: DataLoader(_InBatches(), 5, shuffle=True),
    "workers": lambda: DataLoader(Samples(item), 5, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(DATA, 5, shuffle=True, num_workers=1, persistent_workers=True),
}


class _DrawnAtOnce:
    """A batch sampler whose `__iter__` draws, not the first `next`: before the loader draws its workers' seed."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(23).split(5))

    def __len__(self) -> int:
        return 5


class _InBatches(Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(X[index], index) for index in indices]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_every_rank_has_its_rows_of_one_device_s_batches(on_rank: Any, make: Make) -> None:
    expected, then = epochs_of(make)
    for world_size in (2, 3):
        for rank in range(world_size):
            found, after = on_rank(make, rank, world_size)
            assert after == then
            assert len(found) == len(expected)
            assert shared_out(found) == [len(tree_leaves(whole)[0]) >= world_size for whole in expected]
            for batch, whole in zip(found, expected, strict=True):
                assert_rows(batch, whole, rank, world_size)
        if make is LOADERS["workers"]:
            return  # once is enough


def test_only_own_rows_are_read_once_the_first_batch_has_told(on_rank: Any) -> None:
    read: SimpleQueue[int] = SimpleQueue()  # which nobody looks into, as into a list

    def make(index: int) -> Any:
        read.put(index)
        return X[index]

    on_rank(lambda: DataLoader(Samples(make, 20), 5), 1, 2, epochs=1)
    assert [read.get() for _ in range(read.qsize())] == [*range(5), 7, 8, 9, 12, 13, 14, 17, 18, 19]
    on_rank(lambda: DataLoader(Samples(make, 20), 5), 1, 2, epochs=2)
    assert read.qsize() == 5 + 3 * 3 + 4 * 3


def test_strings_are_left_whole(on_rank: Any) -> None:
    said: list[str] = []

    def make() -> DataLoader[Any]:
        return DataLoader(Samples(lambda index: {"x": X[index], "name": f"n{index}"}), 5, shuffle=True)

    expected, then = epochs_of(make)
    for rank in range(2):
        found, after = on_rank(make, rank, 2, say=said.append)
        assert after == then
        assert not any(shared_out(found))
        for batch, whole in zip(found, expected, strict=True):
            assert_rows(batch, whole, rank, 2)
    assert any("read whole by every rank: its batches are not stacked tensors" in line for line in said)


AUGMENTED = {
    "torch": lambda index: X[index] + torch.rand(2),
    "random": lambda index: X[index] + random.random(),
    "numpy": lambda index: X[index] + np.random.rand(),
}


@pytest.mark.parametrize("sample", AUGMENTED.values(), ids=AUGMENTED)
@pytest.mark.parametrize("workers", [0, 1])
def test_where_reading_draws_every_rank_reads_all(on_rank: Any, sample: Any, workers: int) -> None:
    said: list[str] = []

    def make() -> DataLoader[Any]:
        return DataLoader(Samples(sample), 8, shuffle=True, num_workers=workers)

    expected, then = epochs_of(make)
    found, after = on_rank(make, 1, 2, say=said.append)
    assert after == then
    assert all(shared_out(found))
    for batch, whole in zip(found, expected, strict=True):
        assert_rows(batch, whole, 1, 2)
    assert [line for line in said if "reading its samples draws random numbers" in line]
    assert [line for line in said if "test_splitting.py:" in line]


@pytest.mark.parametrize("first", [4, 9])
@pytest.mark.parametrize("workers", [0, 1])
def test_drawing_that_begins_later_is_refused(on_rank: Any, first: int, workers: int) -> None:
    """In the fourth batch, or in the second epoch."""

    read: SimpleQueue[int] = SimpleQueue()

    class Later(Samples):
        def __getitem__(self, index: int) -> Any:
            read.put(index)
            return X[index] + (torch.rand(2) if read.qsize() > first * 4 else 0)

    def make() -> DataLoader[Any]:
        return DataLoader(Later(item, 16), 4, num_workers=workers, persistent_workers=workers > 0)

    with pytest.raises(Refused, match="begun to draw random numbers"):
        on_rank(make, 1, 2, epochs=6)
    gc.collect()  # the error's frames hold the loader, and it its worker


@pytest.mark.parametrize(
    "sample", [lambda index: 1 if index < 10 else 0.5, lambda index: {"x": 1, **({"y": 2} if index > 11 else {})}]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_form_that_depends_on_the_samples_is_refused(on_rank: Any, sample: Any, workers: int) -> None:
    """A whole batch has the type of its numbers, or the keys of its first sample, which some rank does not read."""
    with pytest.raises(Refused, match="not stacked as the first one was"):
        on_rank(lambda: DataLoader(Samples(sample, 16), 8, num_workers=workers), 1, 2)
    gc.collect()  # the error's frames hold the loader, and it its worker


def test_samples_that_draw_from_streams_of_their_own(on_rank: Any) -> None:
    """The samples are the same on any number of ranks and workers, and differ between epochs."""

    def sample(index: int) -> Any:
        return torch.cat([X[index], torch.rand(1), torch.tensor([random.random(), np.random.rand()])])

    def make(workers: int) -> Make:
        return lambda: DataLoader(Samples(sample), 7, shuffle=True, num_workers=workers)

    one = [tree_map_only(BatchTensor, BatchTensor.to_local, b) for b in on_rank(make(0), 0, 1, loading="shared")[0]]
    for world_size, workers in ((2, 0), (3, 0), (2, 1)):
        ranks = [on_rank(make(workers), rank, world_size, loading="shared")[0] for rank in range(world_size)]
        for batch, *parts in zip(one, *ranks, strict=True):
            together = [part.to_local() if isinstance(part, BatchTensor) else part for part in parts]
            whole = torch.cat(together) if isinstance(parts[0], BatchTensor) else together[0]
            assert torch.equal(whole, batch)
    seen = torch.cat(one)
    first, second = (epoch[epoch[:, 0].argsort()] for epoch in seen.chunk(2))
    assert torch.equal(first[:, :2], second[:, :2])
    assert not (first[:, 2:] == second[:, 2:]).any()


def test_streams_of_their_own_leave_the_script_s_as_they_are(on_rank: Any) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Samples(lambda index: X[index]), 7, shuffle=True)

    assert on_rank(make, 1, 2, loading="shared")[1] == epochs_of(make)[1]


def test_persistent_workers_give_other_samples_in_every_epoch(on_rank: Any) -> None:
    def make() -> DataLoader[Any]:
        samples = Samples(lambda index: X[index] * 0 + torch.rand(2))
        return DataLoader(samples, 23, num_workers=1, persistent_workers=True)

    first, second = on_rank(make, 0, 2, loading="shared")[0]
    assert not (first.to_local() == second.to_local()).any()


def test_the_script_s_worker_init_finds_the_script_s_dataset(on_rank: Any) -> None:
    def init(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.make = lambda index: X[index] + 100 * (worker + 1)

    def make() -> DataLoader[Any]:
        return DataLoader(Samples(item), 5, num_workers=1, worker_init_fn=init)

    expected, _ = epochs_of(make, 1)
    for batch, whole in zip(on_rank(make, 1, 2, epochs=1)[0], expected, strict=True):
        assert_rows(batch, whole, 1, 2)


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(9))


@pytest.mark.parametrize(
    ("make", "loading", "can"),
    [
        (lambda: DataLoader(DATA, 5), "auto", True),
        (lambda: DataLoader(DATA, 5), "shared", True),
        (lambda: DataLoader(DATA, 5), "whole", False),
        (lambda: DataLoader(DATA, batch_size=None), "auto", False),
        (lambda: DataLoader(DATA, 5, collate_fn=lambda samples: samples), "auto", False),
        (lambda: DataLoader(_Stream(), 5), "auto", False),
        (lambda: DataLoader(DATA, 5, num_workers=2, in_order=False), "auto", False),
    ],
)
def test_which_loaders_may_be_shared_out(make: Make, loading: Loading, can: bool) -> None:
    assert can_split(make(), loading) == can


def test_what_is_left_alone_is_read_as_it_was(on_rank: Any) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(_Stream(), 4)

    assert [b.tolist() for b in on_rank(make, 1, 2, 1)[0]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_batch_that_is_not_stacked_as_the_first_was_is_refused(on_rank: Any) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Samples(lambda index: X[index] if index < 5 else f"n{index}", 10), 5)

    with pytest.raises(Refused, match="not stacked as the first one was; use --loading whole"):
        on_rank(make, 1, 2, 1)


def test_what_is_stacked() -> None:
    assert is_stacked([torch.zeros(3, 2), {"a": torch.zeros(3)}], 3)
    assert not is_stacked([torch.zeros(3), torch.zeros(2)], 3)
    assert not is_stacked([torch.zeros(3), "text"], 3)
    assert not is_stacked(torch.zeros(()), 3)
