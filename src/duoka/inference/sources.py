"""Read batches in order, numbered, and only when there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from duoka.data.loader import Loader
from duoka.errors import OptionError
from duoka.inference import rows

KINDS = "a dataset, a DataLoader, an iterable, a tensor, an array, or a dict of tensors"


@dataclass(slots=True, eq=False)  # batches are compared by identity
class Batch:
    """Items that go through the model together.

    indices: positions in the data. rows: number of rows, or None if unknown. error: raised while reading.
    device_failures: number of devices that failed on it.
    """

    number: int
    indices: range
    content: Any
    rows: int | None = None
    error: Exception | None = None
    device_failures: int = 0


Share = tuple[int, int]  # rank, world size: the share is batches rank, rank + world size, ...


def batches(data: Any, size: Any, share: Share = (0, 1)) -> Iterator[Batch]:
    """Read `data` in batches.

    Args:
        data: rows of a tensor or array, items of a dataset or iterable, or batches of a DataLoader.
        size: items in a batch; None if each item is a batch already. Ignored for a DataLoader.
        share: the batches to read; they are numbered consecutively, while `indices` refer to all of `data`.

    Raises:
        OptionError: `data` or `size` is of another type.
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise OptionError("batch_size", size, "a whole number from 1, or None if items are batches already")
    if isinstance(data, Loader):  # of a run: its batches are whole here
        data = data.data_loader
    if isinstance(data, DataLoader):
        return _numbered(iter(data), share)
    if isinstance(data, numpy.ndarray):
        return _of_rows(lambda start, stop: torch.from_numpy(numpy.array(data[start:stop])), len(data), size, share)
    if isinstance(data, (torch.Tensor, Mapping)):
        data = rows.each_leaf(_whole, data)
        total = rows.count(data)
        if total is None:
            raise OptionError("data", type(data).__name__, KINDS, "this one has no rows")
        return _of_rows(lambda start, stop: rows.partition(data, start, stop, total), total, size, share)
    if isinstance(data, (str, bytes)):
        raise OptionError("data", data, KINDS)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        return _of_items(data, size, share)
    if isinstance(data, Iterable):
        return _numbered(iter(data) if size is None else _collated(iter(data), size), share)
    raise OptionError("data", type(data).__name__, KINDS)


def _of_rows(read: Callable[[int, int], Any], total: int, size: int | None, share: Share) -> Iterator[Batch]:
    for number, indices in _batch_ranges(total, size or total or 1, share):
        yield Batch(number, indices, read(indices.start, indices.stop), len(indices))


def _of_items(data: Any, size: int | None, share: Share) -> Iterator[Batch]:
    """Read items by index, so that an unreadable one fails only its own batch."""
    if size is None:
        yield from _numbered((data[index] for index in range(len(data))), share)
        return
    for number, indices in _batch_ranges(len(data), size, share):
        batch = Batch(number, indices, None, len(indices))
        try:
            batch.content = default_collate([data[index] for index in indices])
        except Exception as error:
            batch.error = error
        yield batch


def _batch_ranges(total: int, size: int, share: Share) -> Iterator[tuple[int, range]]:
    """Yield number and items of each batch of a share, without reading the others."""
    rank, world_size = share
    for number, start in enumerate(range(rank * size, total, world_size * size)):
        yield number, range(start, min(start + size, total))


def _collated(items: Iterator[Any], size: int) -> Iterator[Any]:
    while some := list(islice(items, size)):
        yield default_collate(some)


def _numbered(contents: Iterator[Any], share: Share) -> Iterator[Batch]:
    """Number batches as they come. A batch whose rows cannot be counted counts as one item."""
    rank, world_size = share
    start = 0
    for place, given in enumerate(contents):
        content = rows.each_leaf(_whole if world_size == 1 else _of_one_rank, given)
        found = rows.count(content)
        stop = start + (1 if found is None else found)
        if place % world_size == rank:
            yield Batch(place // world_size, range(start, stop), content, found)
        start = stop


def _whole(leaf: Any) -> Any:
    """Gather a tensor that is sharded over ranks, such as a batch tensor."""
    return leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf


def _of_one_rank(leaf: Any) -> Any:
    """Return the leaf; refuse a batch tensor, since ranks that read ahead independently cannot gather it."""
    if hasattr(leaf, "full_tensor"):
        hint = "hand in the data set, or what run.loader gave; or say ranks=None"
        raise OptionError("data", "an iterable of batch tensors", "used without ranks that share the work", hint)
    return leaf
