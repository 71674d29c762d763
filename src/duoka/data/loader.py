"""`run.loader`: global batches, of which each rank loads and holds its own rows."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    default_collate,
)

from duoka.data.splitting import (
    LabelledBatch,
    Reader,
    RequestSampler,
    can_split,
    is_stacked,
    own_rows,
    reading_through,
)
from duoka.errors import OptionError
from duoka.hardware.accelerator import has_streams
from duoka.planning.options import Loading
from duoka.private.torch import KEPT_ITERATOR, tree_leaves, tree_map_only
from duoka.view.generators import random_states, set_random_states
from duoka.view.shares.partition import Partition
from duoka.view.view import View

ContextFactory = Callable[[], AbstractContextManager[None]]


class Loader:
    """Yields global batches, epoch after epoch; created by `run.loader`.

    batch_size: of the global batch; None if a batch sampler decides. dataset: the data set it reads. data_loader:
    torch's DataLoader, which reads whole batches. epoch: number of epochs read to their end.

    Batches of a dataset with indices are read through a `Reader`, also on one rank, as this indexes tensors at once
    instead of sample by sample. A stream is read by every rank, of which each stacks its own rows only.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        view: View,
        loading: Loading,
        rank_local: ContextFactory,
        device: torch.device,
        cut: Callable[[int], Sequence[int]] | None,
        held: ContextFactory,
    ) -> None:
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self.epoch = 0
        self.data_loader = loader
        self._view, self._device, self._held, self._has_pieces = view, device, held, cut is not None
        self._sampler: RequestSampler | None = None  # of a stream: batches that are skipped have to be read
        self._seen = 0  # batches of this epoch that were yielded
        self._order: dict[str, Any] = {}  # states of the generators from which the epoch's order was drawn
        self._resumed = False
        self._form: list[Any] = []  # of the batches of a stream
        self._going_on = 0  # iterations that have begun and not ended
        self._step_hooks: list[Callable[[], object]] = []
        split, exact = view.shares.of_process, view.shares.exact
        if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
            splits = can_split(loader, loading)
            may_split = None if splits and view.ranks.world_size > 1 else False
            self._reader = Reader(loader, split, loading if splits else "whole", rank_local, may_split, exact)
            # Its generator is the CPU's, on which torch then does not draw where another device is the default.
            draws_on_cpu = type(loader.sampler) is RandomSampler and loader.sampler.generator is None
            self._sampler = RequestSampler(loader, view, cut, draws_on_cpu)
            self._through = reading_through(loader, self._reader, self._sampler)
            return
        self._through = copy.copy(loader)
        self._through.__dict__[KEPT_ITERATOR] = None
        if loader.batch_size is not None:
            self._through.collate_fn = StreamCollate(loader.collate_fn, split)

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on every rank."""
        return len(self.data_loader)

    def __iter__(self) -> Iterator[Any]:
        around = self._seen, self._order
        return self._iterate(self._begin(), around)

    def _iterate(self, batches: Iterator[Any], around: tuple[int, dict[str, Any]]) -> Iterator[Any]:
        """Yield the batches. around: the position to restore if this iteration ends early within another one."""
        seen, order = self._seen, self._order
        within = self._going_on
        self._going_on += 1
        try:
            for batch in batches:
                seen += 1
                self._seen, self._order = seen, order
                yield batch
                for hook in self._step_hooks:
                    hook()
        except GeneratorExit:
            if within:
                self._seen, self._order = around
            raise
        except Exception as error:
            self._view.raised(error)
            raise
        finally:
            self._going_on -= 1
        self.epoch, self._seen = self.epoch + 1, 0

    def _begin(self) -> Iterator[Any]:
        """Return the batches of the epoch, on this rank's device, from the first that was not yielded yet."""
        set_epoch = getattr(self.data_loader.sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)
        if self._resumed and self._seen:
            with drawing_from(self._order, self.data_loader):
                batches = self._read()
                if self._sampler is not None:
                    self._sampler.draw()
        else:
            self._seen = 0
            self._order = generator_states(self.data_loader)
            batches = self._read()
        self._resumed = False
        batches = to_device(batches, self._device)
        if self._sampler is None or not self._has_pieces:
            return batches
        return _in_pieces(batches, self._sampler.groups, self._held)

    def _read(self) -> Iterator[Any]:
        """Begin to read the epoch, without its first `_seen` batches."""
        if self._sampler is None:
            if isinstance(self._through.collate_fn, StreamCollate):
                self._through.collate_fn.weights = self._view.weights  # for the epoch, as its workers read ahead
            batches = iter(self._through)
            for _ in range(self._seen):
                next(batches, None)
            return map(self._of_stream, batches)
        self._reader.begin_epoch(self.epoch + 1)
        self._sampler.epoch, self._sampler.skip = self.epoch + 1, self._seen
        return (self._reader.as_seen(labelled, self._view, splits_mixed=True) for labelled in iter(self._through))

    def _of_stream(self, batch: Any) -> Any:
        """Return a batch of a stream, or one that the dataset made itself, with batch tensors."""
        if not isinstance(batch, LabelledBatch):
            tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
            batch = LabelledBatch(batch, next((leaf.shape[0] for leaf in tensors), 0))
        if not self._view.splits(batch.n):
            return batch.batch
        return batch.as_batch_tensors(self._view, self._form, "give the loader a collate_fn")

    def register_step_hook(self, hook: Callable[[], object]) -> None:
        """Register a function to be called whenever the loop has finished a batch; the position is then after it."""
        self._step_hooks.append(hook)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, also within an epoch, valid for any number of ranks and loader workers."""
        order = self._order if self._seen else generator_states(self.data_loader)
        return {"epoch": self.epoch, "batch": self._seen, "order": order}

    def load_state_dict(self, state: Any) -> None:
        """Continue at the first batch that was not yielded.

        Raises OptionError if `state` is not from `state_dict`.
        """
        if not isinstance(state, dict) or state.keys() != {"epoch", "batch", "order"}:
            raise OptionError("load_state_dict", sorted(state), "what a loader's state_dict() gave")
        self.epoch, self._seen, self._order = state["epoch"], state["batch"], state["order"]
        self._resumed = True
        with drawing_from(self._order, self.data_loader):
            pass  # restores the loader's own generators; the script's are restored by the script


class StreamCollate:
    """The `collate_fn` of a stream's batches, with their numbers of samples.

    With default_collate, only this rank's rows are stacked from the second batch on. split: between processes, of no
    samples.
    """

    weights: tuple[float, ...] = ()  # of the ranks' shares

    def __init__(self, collate: Callable[[list[Any]], Any], split: Partition) -> None:
        self._collate, self._split = collate, split
        self._is_stacked = None if collate is default_collate else False  # None: the first batch decides

    def __call__(self, samples: list[Any]) -> LabelledBatch:
        n = len(samples)
        if self._is_stacked and n >= self._split.fewest:
            own = own_rows(self._split, n, self.weights)
            return LabelledBatch(self._collate(samples[own]), n, own.stop - own.start, weights=self.weights)
        batch = self._collate(samples)
        if self._is_stacked is None:
            self._is_stacked = is_stacked(batch, n)
        return LabelledBatch(batch, n)


class Pieces:
    """The pieces of one global batch, in order; each is a batch itself.

    n: samples in the whole batch. weight: fraction of the present piece, its samples / n: multiply a mean loss by it,
    so that the accumulated gradients are those of the whole batch. Gradients are all-reduced with the last piece
    only.
    """

    def __init__(self, pieces: Iterator[Any], sizes: Sequence[int], held: ContextFactory) -> None:
        self.n, self.weight = sum(sizes), sizes[0] / sum(sizes)
        self._pieces, self._sizes, self._held = pieces, sizes, held
        self._yielded = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Any]:
        for number, size in enumerate(self._sizes):
            if number < self._yielded:
                raise RuntimeError("the pieces of a batch can be iterated over only once")
            piece = next(self._pieces)
            self._yielded += 1
            self.weight = size / self.n
            with nullcontext() if self._yielded == len(self._sizes) else self._held():
                yield piece

    def skip_rest(self) -> None:
        """Skip the pieces that the script did not take."""
        for _ in range(self._yielded, len(self._sizes)):
            next(self._pieces)
        self._yielded = len(self._sizes)


def _in_pieces(pieces: Iterator[Any], groups: deque[Sequence[int]], held: ContextFactory) -> Iterator[Pieces]:
    for first in pieces:  # the loader has requested it, so that `groups` has the sizes
        group = Pieces(chain([first], pieces), groups.popleft(), held)
        yield group
        group.skip_rest()


def generator_states(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the states of all generators from which the order of an epoch may be drawn."""
    of_torch, of_python, of_numpy = random_states()
    states: dict[str, Any] = {
        "torch": of_torch["cpu"],
        "python": [of_python[0], list(of_python[1]), of_python[2]],
        "numpy": [of_numpy[0], torch.from_numpy(of_numpy[1].astype(np.int64)), *of_numpy[2:]],
    }
    return states | {name: generator.get_state() for name, generator in _generators_of(loader).items()}


@contextmanager
def drawing_from(states: dict[str, Any], loader: DataLoader[Any]) -> Iterator[None]:
    """Set the generators to `states`; afterwards restore those of the script."""
    before = random_states()
    torch.set_rng_state(states["torch"])
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    for name, generator in _generators_of(loader).items():
        if isinstance(states.get(name), Tensor):
            generator.set_state(states[name])
    try:
        yield
    finally:
        set_random_states(before)


def _generators_of(loader: DataLoader[Any]) -> dict[str, Generator]:
    """Return the generators that belong to this loader."""
    candidates = {"loader": loader.generator, "sampler": getattr(loader.sampler, "generator", None)}
    return {name: generator for name, generator in candidates.items() if isinstance(generator, Generator)}


# The arguments of `run.loader`.


def make_loader(
    data: Any,
    batch_size: int | None,
    view: View,
    device: torch.device,
    loading: Loading,
    held: ContextFactory,
    rank_local: ContextFactory,
    *,
    shuffle: bool = False,
    accumulate: int | None = None,
    micro_batch: int | None = None,
    how: dict[str, Any],
) -> Loader:
    """Create a Loader; see `duoka.run.Run.loader`.

    held: a context in which gradients are not all-reduced. rank_local: a context in which this rank reads data that
    the others do not.
    """
    loader = data if isinstance(data, DataLoader) else _made(data, batch_size, shuffle, device, how)
    if loader is data and (batch_size is not None or shuffle or how):
        raise OptionError(
            "run.loader", "a DataLoader and options", "given one or the other", "set them in the DataLoader"
        )
    samplers: tuple[Any, ...] = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        hint = "leave it out: duoka splits every batch by itself"
        raise OptionError("run.loader", "a DistributedSampler", "given samplers of one device", hint)
    cut = _cut(loader, accumulate, micro_batch)
    return Loader(loader, view, loading, rank_local, device, cut, held)


def _made(data: Any, batch_size: int | None, shuffle: bool, device: torch.device, how: dict[str, Any]) -> Any:
    dataset = _dataset(data)
    _check_batch_size(batch_size, how)
    if shuffle and (how.get("sampler") is not None or how.get("batch_sampler") is not None):
        hint = "a sampler decides the order: leave shuffle out"
        raise OptionError("run.loader", "shuffle=True and a sampler", "given one of both", hint)
    if shuffle and isinstance(dataset, IterableDataset):
        raise OptionError("shuffle", True, "left out for a dataset without indices", "let the dataset shuffle")
    if has_streams(device) and not _holds_gpu_tensors(dataset):  # which cannot be pinned
        how = {"pin_memory": True} | how
    if batch_size is not None:
        how = {"batch_size": batch_size} | how
    try:
        return DataLoader(dataset, shuffle=shuffle or None, **how)
    except (TypeError, ValueError) as error:
        raise OptionError("run.loader", sorted(how), "given options of DataLoader", str(error)) from None


def _dataset(data: Any) -> Dataset[Any]:
    """Return a dataset; tensors and arrays with equal numbers of rows become a TensorDataset."""
    if isinstance(data, (Tensor, np.ndarray)):
        data = (data,)
    if isinstance(data, (tuple, list)) and data and all(isinstance(array, (Tensor, np.ndarray)) for array in data):
        tensors = [torch.as_tensor(array) for array in data]
        rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        if len(set(rows)) > 1 or rows[0] == 0:
            allowed = "tensors with equal numbers of rows, at least 1"
            raise OptionError("data of run.loader", f"tensors of {rows} rows", allowed)
        return TensorDataset(*tensors)
    if isinstance(data, dict):
        hint = "torch.utils.data.StackDataset(**tensors) is a dataset of dicts"
        raise OptionError("data of run.loader", "a dict", "a dataset, a DataLoader, tensors or arrays", hint)
    if not hasattr(data, "__getitem__") and not isinstance(data, IterableDataset):
        hint = "for example: run.loader((images, labels), batch_size=256)"
        raise OptionError("data of run.loader", type(data), "a dataset, a DataLoader, tensors or arrays", hint)
    return data  # type: ignore[no-any-return]


def _holds_gpu_tensors(data: Any, depth: int = 4) -> bool:
    """Return whether a dataset has tensors of a GPU among its attributes; no sample is read."""
    if isinstance(data, Tensor):
        return data.device.type != "cpu"
    if isinstance(data, dict):
        data = tuple(data.values())
    parts = data[:8] if isinstance(data, (tuple, list)) else vars(data).values() if hasattr(data, "__dict__") else ()
    return depth > 0 and any(_holds_gpu_tensors(part, depth - 1) for part in parts)


def _check_batch_size(batch_size: object, how: dict[str, Any]) -> None:
    if how.get("batch_sampler") is not None:
        if batch_size is not None:
            raise OptionError("batch_size", batch_size, "left out where a batch_sampler is given")
        return
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise OptionError("batch_size", batch_size, "a whole number of samples, at least 1: of all ranks together")


def _cut(loader: DataLoader[Any], accumulate: Any, micro_batch: Any) -> Callable[[int], Sequence[int]] | None:
    """Return a function that cuts a batch of n samples into pieces, as even as possible, and returns their sizes."""
    if accumulate is None and micro_batch is None:
        return None
    name, value = ("accumulate", accumulate) if micro_batch is None else ("micro_batch", micro_batch)
    if accumulate is not None and micro_batch is not None:
        raise OptionError("run.loader", "accumulate and micro_batch", "given one of both")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(name, value, "a whole number, at least 1")
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        raise OptionError(name, value, "left out for a dataset without indices", "use a smaller batch_size")
    return lambda n: Partition(n, 0, min(accumulate or -(-n // value), n)).sizes


# Batches on the device, each copied while the previous one is computed on.


def to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on `device`; with streams the next one is copied on its own while one is in use."""
    if device.type == "cpu":
        return batches
    if not has_streams(device):
        return (_to(batch, device) for batch in batches)
    return _prefetch(batches, device)


def _to(batch: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf.to(device, non_blocking=True), batch)


def _prefetch(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream, current = torch.Stream(device), torch.accelerator.current_stream

    def copied() -> Any:
        stream.wait_stream(current(device))  # which may write what the batch is taken from
        with stream:
            for batch in batches:
                return _to(batch, device), stream.record_event()
        return None

    coming = copied()
    while coming is not None:
        batch, there = coming
        current(device).wait_event(there)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                leaf.record_stream(current(device))  # keeps the memory of all shares until this stream is done
        coming = copied()
        yield batch
