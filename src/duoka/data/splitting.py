"""A DataLoader of which each rank reads only its own rows, and yields batch tensors.

The loader's own samplers, generator and workers are unchanged, so batches come in the order and with the content that
one device would see; only reading and collating are limited to the rows.

The first batch is read whole. It shows that collating only stacks, that reading draws no random numbers, and that the
dataset keeps no state between samples. Otherwise every rank reads whole batches: the same result, but not faster.
Each loader worker decides so on the first batch that it reads; the first decision that arrives is sent to the workers
of the next epoch.

Why: docs/decisions/0013-reading-samples.md
"""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import GEN_CREATED, getgeneratorstate
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from duoka.data.dataset_state import DatasetState, batches_held, state_of
from duoka.errors import Refused
from duoka.planning.options import Loading
from duoka.private.torch import (
    KEPT_ITERATOR,
    ExceptionWrapper,
    new_iterator,
    pin_memory,
    reset_iterator,
    tree_flatten,
    tree_leaves,
    tree_map_only,
)
from duoka.supervision import tracebacks
from duoka.system.user_code import user_line
from duoka.view.generators import random_marks, random_states, seed_all, set_random_states
from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View

_GETITEM = {kind: kind.__getitem__ for kind in (TensorDataset, Subset)}
_HOLDS = "its dataset holds batches or sharded parameters"
CHANGES = 2  # batches that may change a dataset: the first may open a file or fill a cache


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request for one batch."""

    epoch: int  # its number
    indices: list[Any]
    weights: tuple[float, ...]  # of the ranks' shares (`Partition`) now, which may be long before it is read


class RequestSampler:
    """A batch sampler that yields `BatchRequest`s for the batches of a loader, each cut into pieces.

    cut: returns the sizes of the pieces of a batch of so many samples. draws_on_cpu: whatever the default device is.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        view: View,
        cut: Callable[[int], Sequence[int]] | None = None,
        draws_on_cpu: bool = False,
    ) -> None:
        assert loader.batch_sampler is not None
        self._batches: Iterable[Sequence[Any]] = loader.batch_sampler
        self._view, self._cut = view, cut or (lambda n: (n,))
        self._draws_on_cpu = draws_on_cpu
        self.batch_size = None if cut else getattr(self._batches, "batch_size", None)  # of the loader's iterator
        self.epoch = 0  # number of the next iteration
        self.skip = 0  # batches that it leaves out
        self.groups: deque[Sequence[int]] = deque()  # sizes of the pieces of each batch that the last has requested
        self._rest: Any = None
        self._drawn: list[BatchRequest] = []

    def __iter__(self) -> Iterator[BatchRequest]:
        self.groups, self._drawn = deque(), []
        batches = iter(self._batches)  # begins the script's sampler now, as its loader does
        self._rest = self._requests(batches, self.epoch, self.skip, self.groups)
        return chain(self._drawn, self._rest)

    def _requests(
        self, batches: Iterator[Sequence[Any]], epoch: int, skip: int, groups: deque[Sequence[int]]
    ) -> Iterator[BatchRequest]:
        while True:
            with torch.device("cpu") if self._draws_on_cpu else nullcontext():
                batch = next(batches, None)
            if batch is None:
                return
            if skip:
                skip -= 1
                continue
            indices = list(batch)
            groups.append(self._cut(len(indices)))
            for size in groups[-1]:
                yield BatchRequest(epoch, indices[:size], self._view.weights)
                del indices[:size]

    def draw(self) -> None:
        """Draw the order of the last iteration now, instead of with its first batch."""
        if getgeneratorstate(self._rest) == GEN_CREATED:  # loader workers have not been sent requests yet
            self._drawn += islice(self._rest, 1)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LabelledBatch:
    """A batch of `n` samples, as a loader worker sends it."""

    batch: Any
    n: int
    rows: int | None = None  # of this rank, if it holds only these; None: all
    why: str = ""  # the reason for reading it whole, if it was decided
    seeded: bool = False  # each of its samples has drawn from a generator of its own
    weights: tuple[float, ...] = ()  # of the ranks' shares when it was requested

    def pin_memory(self) -> LabelledBatch:
        """Pin the batch, but for tensors of a GPU; called by torch's pinning thread."""
        if all(leaf.device.type == "cpu" for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor)):
            return replace(self, batch=pin_memory(self.batch))
        pinned = tree_map_only(Tensor, lambda leaf: leaf.pin_memory() if leaf.is_cpu else leaf, self.batch)
        return replace(self, batch=pinned)

    def as_batch_tensors(self, view: View, form: list[Any], advice: str) -> Any:
        """Return the batch with batch tensors of its tensors.

        form: of the last batch that was read whole, which sets it. Raises Refused if this rank's rows have another
        one, as other ranks' rows may have yet another. advice: what to do then.
        """
        n, now = self.n, form_of(self.batch)
        if self.rows is None:
            form[:] = now
        elif now != form or not is_stacked(self.batch, self.rows):
            raise Refused(f"a batch of {n} samples is not stacked as the first one was; {advice}")

        def as_batch(leaf: Tensor) -> Tensor:
            if isinstance(leaf, BatchTensor):  # stacked from samples that are batches themselves
                return leaf
            if self.rows is not None:  # not by the view's weights, which may have changed since the batch was read
                batch = BatchTensor.of_rows(leaf, n, view, self.weights)
            elif leaf.dim() and leaf.shape[0] == n:
                batch = BatchTensor.of(leaf, view)
            else:
                return leaf
            return batch.pin_memory() if leaf.is_pinned() and not batch.is_pinned() else batch  # a copy is not pinned

        return tree_map_only(Tensor, as_batch, self.batch)


@lru_cache
def own_rows(split: Partition, n: int, weights: tuple[float, ...]) -> slice:
    """Return which rows of a batch of n samples this rank has. split: between processes, of no samples."""
    partition = split.of(n, weights)
    return slice(partition.start, partition.start + partition.rows)


class Reader:
    """Stands for a loader's dataset and `collate_fn`: reads the batch of a request.

    It is sent to loader workers, so it holds numbers and the dataset, no process group. With loading "auto" it checks
    whether reading draws random numbers. With "shared" every sample draws from a generator seeded by (seed, epoch,
    index): the same for any number of ranks.

    split: between processes, of no samples. rank_local: a context for reading rows that the other ranks do not read.
    reseeds: with "auto", switch to "shared" if reading draws.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        split: Partition,
        loading: Loading,
        rank_local: Callable[[], AbstractContextManager[None]] = nullcontext,
        may_split: bool | None = None,
        reseeds: bool = False,
    ) -> None:
        self.dataset, self.collate, self._init = loader.dataset, loader.collate_fn, loader.worker_init_fn
        self._has_workers = loader.num_workers > 0
        self._split, self._rank_local = split, rank_local
        self.seeded = self.seeds_always = loading == "shared"
        self._reseeds, self._draws = reseeds and loading == "auto", False
        self.may_split = may_split  # None: the next batch decides
        self.why = ""  # the reason for reading whole batches
        self.epochs = 0  # begun so far
        self._form: list[Any] = []  # of its batches
        self._changes = 0  # observed changes of the dataset
        self._generators: list[Any] = []  # of the dataset
        self._seed = torch.initial_seed()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rank_local": nullcontext}  # what a loader worker does is rank-local anyway

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, whose batches are read whole if the dataset now holds batches."""
        self.epochs = epoch
        if self.may_split is not False and self._holds_batches():
            self.may_split, self.why = False, _HOLDS

    def _holds_batches(self, read: Any = None) -> bool:
        """Return whether the dataset holds batches or sharded parameters, which no rank can gather by itself.

        Loader workers have whole ones (`plain/loaders.py`). read: a batch of its samples.
        """
        return not self._has_workers and bool(batches_held(read, self.dataset))

    def begin_worker(self, worker: int) -> None:
        """Let the script find its own dataset in the worker's info, and call its `worker_init_fn`."""
        object.__setattr__(get_worker_info(), "dataset", self.dataset)  # its __setattr__ refuses
        if self._init is not None:
            self._init(worker)

    def __getitems__(self, request: BatchRequest) -> Any:
        """Return the batch of a request, or an error of the script in the form that torch's workers send."""
        info = get_worker_info()
        try:
            return self._labelled(request)
        except Exception as error:
            if info is None:
                raise
            tracebacks.trim(error)  # here, as the traceback goes to the loader as text
            where = f"in DataLoader worker process {info.id}"
            return ExceptionWrapper((type(error), error, error.__traceback__), where)

    def _labelled(self, request: BatchRequest) -> LabelledBatch:
        """Read this rank's rows if the batch may be split, else all of them."""
        n = len(request.indices)
        # In a batch of fewer samples some rank would have no row.
        if n < self._split.fewest or self.may_split is False:
            return LabelledBatch(self._read(request), n, why=self.why, seeded=self.seeded)
        if self.may_split is None:
            return LabelledBatch(self._read_and_decide(request), n, why=self.why, seeded=self.seeded)
        own = own_rows(self._split, n, request.weights)
        batch = self._read_own_rows(BatchRequest(request.epoch, request.indices[own], request.weights))
        return LabelledBatch(batch, n, own.stop - own.start, seeded=self.seeded, weights=request.weights)

    def _read_and_decide(self, request: BatchRequest) -> Any:
        """Read a whole batch, and decide whether the next ones may be split."""
        before, state = random_marks(), None if self.seeded else DatasetState(self.dataset)
        if self._reseeds:  # from now on, if a sample of this batch draws
            self.seeded = True
            batch = self._read(request)
            self._reseeds, self.seeded = False, self._draws
        else:
            batch = self._read(request)
        now = None if state is None or self.seeded else DatasetState(self.dataset)
        changed = state.changed(now) if state and now else None
        self._changes += bool(changed)
        if not is_stacked(batch, len(request.indices)):
            self.why = "its batches are not stacked tensors"
        elif self._holds_batches(batch):
            self.why = _HOLDS
        elif not self.seeded and _reads_together(self.dataset):
            self.why = "it reads several samples at once, so one may depend on others (--loading shared reads each)"
        elif before != random_marks():
            self.why = "reading its samples draws random numbers (--loading shared lets each rank draw its own)"
        elif changed and self._changes < CHANGES:
            return batch  # the next batch decides
        elif changed:
            self.why = f"reading its samples changes `{changed}` (--loading shared lets each rank have its own)"
        self.may_split = not self.why
        self._generators = now.generators if now else []
        return batch

    def _read_own_rows(self, request: BatchRequest) -> Any:
        """Read this rank's rows. If loading is not seeded, check that reading draws no random numbers.

        Raises Refused if reading has drawn random numbers.
        """
        if (rows := self._read_in_memory(request)) is not None:  # which draws none; looking costs more than reading
            return rows

        def marks() -> Any:
            return None if self.seeded else (random_marks(), [state_of(each) for each in self._generators])

        # A draw by this rank alone would part the ranks' generators: wrong numbers, without an error.
        before = marks()
        with self._rank_local():
            batch = self._read_samples(request)
        if before != marks():
            raise Refused(
                f"reading samples of {type(self.dataset).__name__} has begun to draw random numbers, which a rank "
                "that reads only its own rows cannot draw as one device would; use --loading whole"
            )
        return batch

    def _read(self, request: BatchRequest) -> Any:
        rows = self._read_in_memory(request)
        return self._read_samples(request) if rows is None else rows

    def _read_in_memory(self, request: BatchRequest) -> list[Tensor] | None:
        stacks = self.collate is default_collate and not self.seeded
        return read_in_memory(self.dataset, request.indices) if stacks else None

    def _read_samples(self, request: BatchRequest) -> Any:
        indices, getitems = request.indices, getattr(self.dataset, "__getitems__", None)
        if self.seeded:
            return self.collate([self._read_seeded(request.epoch, index) for index in indices])
        return self.collate(getitems(indices) if callable(getitems) else [self.dataset[index] for index in indices])

    def _read_seeded(self, epoch: int, index: Any) -> Any:
        states = random_states()  # restored after it: the script's own draws are those of one device
        seed_all(zlib.crc32(f"{self._seed}/{epoch}/{index!r}".encode()))
        seeded = random_marks() if self._reseeds else None
        try:
            return self.dataset[index]
        finally:
            self._draws = self._draws or (seeded is not None and seeded != random_marks())
            set_random_states(states)

    def as_seen(self, labelled: LabelledBatch, view: View, splits_mixed: bool = False) -> Any:
        """Return a batch that was read through this as the script sees it: with batch tensors.

        splits_mixed: also where there are other leaves among its tensors; else it is left to the model's call.
        """
        batch, n, is_local = labelled.batch, labelled.n, labelled.rows is not None
        if not view.splits(n):  # every rank computes all of it
            return batch
        if labelled.why:
            view.say(f"the loader at {user_line()} is read whole by every rank: {labelled.why}")
        if labelled.seeded and not self.seeds_always:
            self.seeded = True  # for the workers of the next epoch
            view.say(
                f"the loader at {user_line()} draws random numbers, seeded by sample and epoch: they are not "
                'those of python (loading="whole" gives these)'
            )
        if not is_local and not splits_mixed and not is_stacked(batch, n):
            return batch
        if self.may_split is None:
            self.may_split = is_local or None  # the workers of the next epoch need not check again
        if view.shares.exact and any(leaf.requires_grad for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)):
            if is_local:
                raise Refused("a sample requires a gradient, those of the first batch did not; use --loading whole")
            self.may_split, self.why = False, "its samples require gradients"
        return labelled.as_batch_tensors(view, self._form, "use --loading whole")


def read_in_memory(dataset: Any, indices: Sequence[Any]) -> list[Tensor] | None:
    """Return samples of a TensorDataset, or of a subset of one, by one indexing of each tensor.

    The values are those of `default_collate([dataset[index] for index in indices])`, to the bit. None: the samples
    have to be read and collated one by one. A loader worker does so, as default_collate writes into memory that the
    worker shares with its loader.
    """
    if get_worker_info() is not None or not all(type(index) is int for index in indices):
        return None
    try:
        while type(dataset) is Subset and Subset.__getitem__ is _GETITEM[Subset]:
            dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
        if type(dataset) is not TensorDataset or TensorDataset.__getitem__ is not _GETITEM[TensorDataset]:
            return None
        if not all(type(tensor) is Tensor and _is_plain(tensor) for tensor in dataset.tensors):
            return None
        if not indices or not 0 <= min(indices) <= max(indices) < len(dataset):
            return None  # negative ones count from the end; an error of an index on a GPU ends its process
        rows = torch.tensor(indices, dtype=torch.long, device="cpu")
        # index_select copies whole rows; tensor[rows] takes several times as long, in all threads.
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in dataset.tensors]
    except IndexError:  # reading one by one names the sample
        return None


def _reads_together(dataset: Any) -> bool:
    """Return whether a dataset reads several samples at once by code of its own (pads them to the longest)."""
    if type(dataset) is Subset:
        return _reads_together(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(map(_reads_together, parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_contiguous()  # else the batch's strides would differ from those of a stack
        and not tensor.requires_grad
        and not tensor.is_quantized
    )


class SplitIterator:
    """The iterator of `iter(loader)`: wraps the loader's own iterator, and converts its batches to batch tensors."""

    def __init__(self, loader: DataLoader[Any], reader: Reader, view: View) -> None:
        self._reader, self._view = reader, view
        self._sampler = RequestSampler(loader, view)
        self._loader = reading_through(loader, reader, self._sampler)
        self._begin()
        self._batches = new_iterator(self._loader)

    def _begin(self) -> None:
        self._reader.begin_epoch(self._reader.epochs + 1)
        self._sampler.epoch = self._reader.epochs

    def _reset(self, loader: DataLoader[Any]) -> None:
        """Begin a new epoch with the same (persistent) workers; called by the loader."""
        self._begin()
        reset_iterator(self._batches, self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            labelled = next(self._batches)
        except Exception as error:
            self._view.raised(error)
            raise
        return self._reader.as_seen(labelled, self._view)


def reading_through(loader: DataLoader[Any], reader: Reader, sampler: RequestSampler) -> DataLoader[Any]:
    """Copy a loader, with samplers and generator, so that it reads through `reader`."""
    through = copy.copy(loader)
    changes = {
        "dataset": reader,
        "collate_fn": as_is,
        "batch_sampler": sampler,
        "worker_init_fn": reader.begin_worker,
        KEPT_ITERATOR: None,
    }
    through.__dict__.update(changes)  # DataLoader.__setattr__ refuses
    return through


def is_stacked(batch: Any, n: int) -> bool:
    """Return True if every leaf of a collated batch is a tensor of n rows."""
    return all(isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == n for leaf in tree_leaves(batch))


def form_of(batch: Any) -> list[Any]:
    """Return the structure of a batch and the types of its tensors, which default_collate takes from its samples."""
    leaves, structure = tree_flatten(batch)
    return [structure, *(leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves)]


def as_is(batch: Any) -> Any:
    """Return the batch unchanged: the `collate_fn` of a loader whose `Reader` has collated."""
    return batch


def can_split(loader: DataLoader[Any], loading: Loading) -> bool:
    """Return True if this loader's batches may be split: a map-style dataset, batched, with default_collate."""
    return (
        loading != "whole"
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
        and not isinstance(loader.dataset, IterableDataset)
        and getattr(loader, "in_order", True)
        and get_worker_info() is None
    )
