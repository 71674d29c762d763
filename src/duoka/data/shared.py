"""A DataLoader of which each rank reads only its own rows, and hands out batch tensors.

The loader's own samplers, generator and workers stay as they are, so batches come in the order and with the
content that one device would see; only the reading and collating of a batch is cut.

That collating is mere stacking, and that reading draws no random number, is seen on the first batch, which is
read whole (by every loader worker that reads one first). Where it is not so, the loader is left whole: right,
but not faster.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from torch.utils._pytree import tree_leaves, tree_map_only

from duoka.errors import Refused
from duoka.options import Loading
from duoka.view.batch import BatchTensor, Spec
from duoka.view.cut import Cut
from duoka.view.view import View


class Reader:
    """Stands for a loader's dataset and its `collate_fn` in one: indices in, a labelled batch out.

    It travels into loader workers, so it holds numbers and the dataset, no process group. With loading "auto"
    it looks at the first batch, and again at batches 1, 2, 4, 8, … of every epoch.
    """

    def __init__(self, dataset: Any, rank: int, world_size: int, loading: Loading) -> None:
        self.dataset, self.rank, self.world_size = dataset, rank, world_size
        self.looking = loading == "auto"
        self.shared: bool | None = None  # None: not known yet
        self._batches = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[Any]) -> dict[str, Any]:
        """The batch of these indices: of all, or where it may be cut of this rank's own."""
        n = len(indices)
        if n < self.world_size or self.shared is False:
            return {"batch": self._read(indices), "n": n, "shared": False}
        if self.shared is None:
            before = _random_states()
            batch = self._read(indices)
            self.shared = is_stacked(batch, n) and (not self.looking or _same_states(before, _random_states()))
            return {"batch": batch, "n": n, "shared": False}
        cut = Cut(n, self.rank, self.world_size)
        return {"batch": self._read_watched(indices[cut.start : cut.start + cut.rows]), "n": n, "shared": True}

    def _read_watched(self, indices: list[Any]) -> Any:
        self._batches += 1
        if not self.looking or self._batches & (self._batches - 1):
            return self._read(indices)
        before = _random_states()
        batch = self._read(indices)
        if not _same_states(before, _random_states()):
            raise Refused(
                f"reading samples of {type(self.dataset).__name__} has begun to draw random numbers, which a rank "
                "that reads only its own rows cannot draw as one device would; use --loading whole"
            )
        return batch

    def _read(self, indices: list[Any]) -> Any:
        getitems = getattr(self.dataset, "__getitems__", None)
        return default_collate(getitems(indices) if callable(getitems) else [self.dataset[index] for index in indices])


class SharedIterator:
    """What `iter(loader)` gives: the loader's own iterator over labelled batches, cut to batch tensors."""

    def __init__(self, loader: DataLoader[Any], reader: Reader, view: View) -> None:
        self._reader, self._view = reader, view
        self._loader = _reading_through(loader, reader)
        self._batches = self._loader._get_iterator()

    def _reset(self, loader: DataLoader[Any]) -> None:
        """A new epoch with the same (persistent) workers; called by the loader."""
        self._batches._reset(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        labelled = next(self._batches)
        batch, n, shared = labelled["batch"], labelled["n"], labelled["shared"]
        if not self._view.shares(n):
            return batch
        cut = self._view.cut(n)
        if shared and not is_stacked(batch, cut.rows):
            raise Refused(f"a batch of {n} samples is not stacked as the first one was; use --loading whole")
        if not shared and not is_stacked(batch, n):
            return batch
        if self._reader.shared is None:
            self._reader.shared = shared or None  # the next epoch's workers need not find out again
        spec = Spec(self._view, cut)
        return tree_map_only(Tensor, lambda leaf: BatchTensor(leaf if shared else spec.own(leaf), spec), batch)


def _reading_through(loader: DataLoader[Any], reader: Reader) -> DataLoader[Any]:
    """The same loader (samplers, generator and all), reading through `reader`."""
    through = copy.copy(loader)
    init = loader.worker_init_fn
    changes = {"dataset": reader, "collate_fn": as_is, "worker_init_fn": init and _WithDataset(init), "_iterator": None}
    through.__dict__.update(changes)  # the loader's own __setattr__ refuses
    return through


class _WithDataset:
    """The script's `worker_init_fn`, which finds the script's dataset in the worker's info."""

    def __init__(self, init: Callable[[int], None]) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Reader):
            info.__dict__["dataset"] = info.dataset.dataset
        self._init(worker)


def is_stacked(batch: Any, n: int) -> bool:
    """Whether every leaf of a collated batch is a tensor of n rows."""
    return all(isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == n for leaf in tree_leaves(batch))


def as_is(batch: Any) -> Any:
    """The collate function of a loader whose `Reader` has collated already."""
    return batch


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1:3] if numpy else None


def _same_states(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    same_numpy = one[2] is other[2] is None or (bool((one[2][0] == other[2][0]).all()) and one[2][1] == other[2][1])
    return torch.equal(one[0], other[0]) and one[1] == other[1] and same_numpy


def can_share(loader: DataLoader[Any], loading: Loading) -> bool:
    """Whether this loader's batches may be cut at all: a map-style dataset, batched, and merely stacked."""
    return (
        loading != "whole"
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
        and not isinstance(loader.dataset, IterableDataset)
        and getattr(loader, "in_order", True)
        and get_worker_info() is None
    )
