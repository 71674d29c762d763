"""Where batches come from: one after the other, numbered, and never read before there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from duoka.errors import OptionError
from duoka.inference import rows

KINDS = "a dataset, a DataLoader, an iterable, a tensor, an array, or a dict of tensors"


@dataclass(slots=True)
class Batch:
    """Some items that go through the model together.

    indices: their places in the data. rows: how many, or None where their structure does not tell.
    error: what reading them raised. deaths: how many devices died computing it.
    """

    number: int
    indices: range
    content: Any
    rows: int | None = None
    error: Exception | None = None
    deaths: int = 0


def batches(data: Any, size: Any) -> Iterator[Batch]:
    """Read `data` in batches.

    Args:
        data: rows of a tensor or an array, items of a dataset or an iterable, batches of a DataLoader.
        size: items in a batch; None where each item is a batch already. A DataLoader brings its own.

    Raises:
        OptionError: `data` or `size` is none of these.
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise OptionError("batch_size", size, "a whole number from 1, or None where items are batches already")
    if isinstance(data, DataLoader):
        return _numbered(iter(data))
    if isinstance(data, numpy.ndarray):
        return _of_rows(lambda start, stop: torch.from_numpy(numpy.array(data[start:stop])), len(data), size)
    if isinstance(data, (torch.Tensor, Mapping)):
        data = rows.each_leaf(_whole, data)
        total = rows.count(data)
        if total is None:
            raise OptionError("data", type(data).__name__, KINDS, "this one has no rows")
        return _of_rows(lambda start, stop: rows.cut(data, start, stop, total), total, size)
    if isinstance(data, (str, bytes)):
        raise OptionError("data", data, KINDS)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        return _of_items(data, size)
    if isinstance(data, Iterable):
        return _numbered(iter(data) if size is None else _collated(iter(data), size))
    raise OptionError("data", type(data).__name__, KINDS)


def _of_rows(read: Callable[[int, int], Any], total: int, size: int | None) -> Iterator[Batch]:
    step = size or total or 1
    for number, start in enumerate(range(0, total, step)):
        stop = min(start + step, total)
        yield Batch(number, range(start, stop), read(start, stop), stop - start)


def _of_items(data: Any, size: int | None) -> Iterator[Batch]:
    """Items by their place, so that one that cannot be read costs only its own batch."""
    if size is None:
        yield from _numbered(data[index] for index in range(len(data)))
        return
    for number, start in enumerate(range(0, len(data), size)):
        indices = range(start, min(start + size, len(data)))
        batch = Batch(number, indices, None, len(indices))
        try:
            batch.content = default_collate([data[index] for index in indices])
        except Exception as error:
            batch.error = error
        yield batch


def _collated(items: Iterator[Any], size: int) -> Iterator[Any]:
    while some := list(islice(items, size)):
        yield default_collate(some)


def _numbered(contents: Iterator[Any]) -> Iterator[Batch]:
    """Batches as they come. One whose rows cannot be counted stands for one item."""
    start = 0
    for number, given in enumerate(contents):
        content = rows.each_leaf(_whole, given)
        found = rows.count(content)
        stop = start + (1 if found is None else found)
        yield Batch(number, range(start, stop), content, found)
        start = stop


def _whole(leaf: Any) -> Any:
    """All of a tensor that is spread over ranks, such as a batch tensor."""
    return leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
