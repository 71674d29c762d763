"""The sources of a loader's batches: one class for each way of reading them.

SplitSource     a dataset with indices, stacked: each rank reads its own rows (`splitting.py`); also on one rank, as
                this indexes tensors at once instead of sample by sample
BatchSource     on one rank, everything else: a custom `collate_fn`, a stream without indices
CountedSource   the same on several. Every rank reads all of it; of a stream with default_collate each stacks its own
                rows only.

Each yields batch tensors, or plain ones if the batch is not sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from duoka.data.order import PieceSampler, ResumableSampler
from duoka.data.splitting import LabelledBatch, Reader, SplitIterator, can_split, is_stacked
from duoka.planning.options import Loading
from duoka.private.torch import GET_ITERATOR, KEPT_ITERATOR, tree_leaves
from duoka.view.shares.partition import Partition
from duoka.view.view import View

ContextFactory = Callable[[], AbstractContextManager[None]]


def choose(
    loader: DataLoader[Any],
    piece_sampler: PieceSampler | None,
    view: View,
    loading: Loading,
    rank_local: ContextFactory,
) -> BatchSource:
    """Choose the fastest source for a loader. rank_local: a context for reading data that the others do not."""
    batches = None
    through = copy.copy(loader)
    if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
        batches = ResumableSampler(piece_sampler or loader.batch_sampler, loader.sampler)
        through.__dict__["batch_sampler"] = batches  # DataLoader.__setattr__ refuses
    through.__dict__[KEPT_ITERATOR] = None
    if can_split(loader, loading):
        return SplitSource(through, batches, view, loading, rank_local)
    if view.ranks.world_size == 1:
        return BatchSource(through, batches)
    return CountedSource(through, batches, view)


class BatchSource:
    """The batches of a loader, epoch after epoch: here those of the loader itself. epoch: index of the next one.

    batches: its batch sampler; None: skipped batches have to be read.
    """

    epoch = 0

    def __init__(self, through: DataLoader[Any], batches: ResumableSampler | None) -> None:
        self._through, self._order = through, batches

    def begin(self, skip: int) -> Iterator[Any]:
        """Begin an epoch without its first `skip` batches (or pieces)."""
        if self._order is not None:
            self._order.skip = skip
        batches = iter(self._through)
        for _ in range(skip if self._order is None else 0):
            next(batches, None)
        return batches

    def draw(self) -> None:
        """Draw the order of the current epoch now."""
        if self._order is not None:
            self._order.draw()


class SplitSource(BatchSource):
    """A loader of which each rank reads its own rows."""

    def __init__(
        self,
        through: DataLoader[Any],
        batches: ResumableSampler | None,
        view: View,
        loading: Loading,
        rank_local: ContextFactory,
    ) -> None:
        super().__init__(through, batches)
        self._reader = reader = Reader(
            through.dataset, view.shares.of_process, loading, rank_local, view.shares.exact
        )
        if view.ranks.world_size == 1:
            reader.may_split = False  # it reads all rows of each batch
        plain = copy.copy(through)
        through.__dict__[GET_ITERATOR[1]] = lambda: SplitIterator(plain, reader, view)

    def begin(self, skip: int) -> Iterator[Any]:
        self._reader.epochs = self.epoch
        return super().begin(skip)


class CountedSource(BatchSource):
    """A loader that every rank reads whole, with the number of samples in each batch."""

    def __init__(self, through: DataLoader[Any], batches: ResumableSampler | None, view: View) -> None:
        stacks = through.collate_fn is default_collate
        self._collate: CountingCollate | None = None
        stream = isinstance(through.dataset, IterableDataset)
        if through.batch_size is not None or through.batch_sampler is not None:
            collate = CountingCollate(through.collate_fn, view.shares.of_process, stream and stacks)
            through.__dict__["collate_fn"] = self._collate = collate
        super().__init__(through, batches)
        self._view = view

    def begin(self, skip: int) -> Iterator[Any]:
        if self._collate is not None:
            self._collate.weights = self._view.weights  # for the epoch, as its workers read ahead
        return map(self._as_batch, super().begin(skip))

    def _as_batch(self, counted: Any) -> Any:
        if not isinstance(counted, LabelledBatch):
            counted = LabelledBatch(counted, _rows(counted), False)
        if counted.n is None or not self._view.splits(counted.n):
            return counted.batch
        return counted.as_batch_tensors(counted.n, self._view, "give the loader a collate_fn")


class CountingCollate:
    """A `collate_fn` that returns a `LabelledBatch`.

    split: between processes, of no samples. splits: stack only this rank's rows. weights: of the ranks' shares.
    """

    weights: tuple[float, ...] = ()

    def __init__(self, collate: Callable[[list[Any]], Any], split: Partition, splits: bool) -> None:
        self._collate, self._split, self._splits = collate, split, splits
        self._is_stacked: bool | None = None  # unknown before the first batch

    def __call__(self, samples: list[Any]) -> LabelledBatch:
        n = len(samples)
        if self._splits and self._is_stacked and n >= self._split.fewest:
            partition = self._split.of(n, self.weights)
            rows = self._collate(samples[partition.start : partition.start + partition.rows])
            return LabelledBatch(rows, n, True, weights=self.weights)
        batch = self._collate(samples)
        if self._is_stacked is None:
            self._is_stacked = is_stacked(batch, n)
        return LabelledBatch(batch, n, False)


def _rows(batch: Any) -> int | None:
    """Return the number of samples of a batch that the dataset made itself: the rows of its first tensor."""
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
    return None if first is None else first.shape[0]
