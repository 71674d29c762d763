"""Batches, read in order; and their rows, whatever their structure.

Batches and outputs are dicts, tuples and lists of tensors, strings and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from duoka.data.loader import Loader
from duoka.errors import AskedError, OptionError

KINDS = "a dataset, a DataLoader, an iterable, a tensor, an array, or a dict of tensors"
SINGLE = (str, bytes, int, float, complex, bool, type(None))
Share = tuple[int, int]  # rank, world size: the share is batches rank, rank + world size, ...


@dataclass(slots=True, eq=False)  # batches are compared by identity
class Batch:
    """Items that go through the model together, and then their outputs."""

    indices: range  # positions in the data
    content: Any
    rows: int | None = None  # None if unknown
    outputs: list[Any] = field(default_factory=list)  # for each item
    error: Exception | None = None  # raised while reading or computing
    device: str = "the data"  # that computed it
    has_failed_device: bool = False  # a device failed on it
    is_finished: bool = False


def batches(data: Any, size: Any, share: Share = (0, 1)) -> Iterator[Batch]:
    """Read `data` in batches.

    data: rows of a tensor or array, items of a dataset or iterable, or batches of a DataLoader. size: items in a
    batch; None if each item is a batch already. Ignored for a DataLoader. share: the batches to read. Raises
    OptionError if `data` or `size` is of another type.
    """
    if size is not None and (not isinstance(size, int) or size < 1):
        raise OptionError("batch_size", size, "a whole number from 1, or None if items are batches already")
    if isinstance(data, Loader):  # of a run: its batches are whole here
        data = data.data_loader
    if isinstance(data, DataLoader):
        return _in_order(iter(data), share)
    if isinstance(data, numpy.ndarray):
        # A copy: torch warns of read-only memory, as that of a memory map.
        return _by_index(
            lambda rows: torch.from_numpy(numpy.array(data[rows.start : rows.stop])), len(data), size, share
        )
    if isinstance(data, (torch.Tensor, Mapping)):
        data = each_leaf(_full, data)
        total = count_rows(data)
        if total is None:
            raise OptionError("data", type(data).__name__, KINDS, "this one has no rows")
        return _by_index(lambda rows: slice_rows(data, rows.start, rows.stop, total), total, size, share)
    if isinstance(data, (str, bytes)):
        raise OptionError("data", data, KINDS)
    # torch's Dataset has no class to ask for: what can be indexed up to a length is one.
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        if size is None:
            return _in_order((data[index] for index in range(len(data))), share)
        return _by_index(lambda rows: default_collate([data[index] for index in rows]), len(data), size, share)
    if isinstance(data, Iterable):
        return _in_order(iter(data) if size is None else _collated(iter(data), size), share)
    raise OptionError("data", type(data).__name__, KINDS)


def _by_index(read: Callable[[range], Any], total: int, size: int | None, share: Share) -> Iterator[Batch]:
    """Read the items of each batch of a share by index, so that an unreadable one fails only its own batch."""
    rank, world_size = share
    size = size or total or 1  # a range has no step of 0
    for start in range(rank * size, total, world_size * size):
        batch = Batch(range(start, min(start + size, total)), None)
        batch.rows = len(batch.indices)
        try:
            batch.content = read(batch.indices)
        except Exception as error:
            batch.error = error
        yield batch


def _collated(items: Iterator[Any], size: int) -> Iterator[Any]:
    while some := list(islice(items, size)):
        yield default_collate(some)


def _in_order(contents: Iterator[Any], share: Share) -> Iterator[Batch]:
    """Yield the batches of a share as they come. A batch whose rows cannot be counted counts as one item."""
    rank, world_size = share
    start = 0
    for number, content in enumerate(contents):
        content = each_leaf(partial(_full, world_size=world_size), content)
        rows = count_rows(content)
        stop = start + (1 if rows is None else rows)
        if number % world_size == rank:
            yield Batch(range(start, stop), content, rows)
        start = stop


def _full(leaf: Any, world_size: int = 1) -> Any:
    if not hasattr(leaf, "full_tensor"):
        return leaf
    if world_size > 1:  # ranks that read ahead independently cannot gather it
        hint = "hand in the data set, or what run.loader gave; or say ranks=None"
        raise OptionError("data", "an iterable of batch tensors", "used without ranks that share the work", hint)
    return leaf.full_tensor()


# Rows.


def count_rows(batch: Any) -> int | None:
    """Return the number of rows of a batch, by its first tensor or list; None if it has none."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else None
    if isinstance(batch, (tuple, list)) and _is_leaf(batch):
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((rows for part in parts if (rows := count_rows(part)) is not None), None)


def slice_rows(batch: Any, start: int, stop: int, rows: int) -> Any:
    """Slice a batch of `rows` rows. Leaves with another number of rows stay as they are."""

    def part(leaf: Any) -> Any:
        has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.size(0) == rows
        return leaf[start:stop] if has_rows or (isinstance(leaf, (tuple, list)) and len(leaf) == rows) else leaf

    return batch if (start, stop) == (0, rows) else each_leaf(part, batch)


def each_leaf(function: Callable[[Any], Any], batch: Any) -> Any:
    """Map `function` over each tensor, list of single values, and single value, keeping the structure."""
    if isinstance(batch, Mapping):
        return {key: each_leaf(function, value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)) and not _is_leaf(batch):
        return _like(batch, [each_leaf(function, value) for value in batch])
    return function(batch)


def split_rows(output: Any, rows: int | None) -> list[Any]:
    """Split a model's output into one for each row, in the same structure. Rows are views of the batch.

    rows: required number of rows; None takes the number found. Raises AskedError if the output does not have one row
    for each item.
    """
    rows = count_rows(output) if rows is None else rows
    if rows is None:
        raise AskedError(f"a model's output must have one row for each item, but it is {_shown(output)}")
    return _split(output, rows)


def _split(output: Any, rows: int) -> list[Any]:
    if isinstance(output, torch.Tensor) and output.dim() and output.size(0) == rows:
        return list(output.unbind(0))
    if isinstance(output, Mapping):
        columns = [_split(value, rows) for value in output.values()]
        return [dict(zip(output, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(output, (tuple, list)):
        if _is_leaf(output) and len(output) == rows:
            return list(output)
        columns = [_split(value, rows) for value in output]
        return [_like(output, list(row)) for row in zip(*columns, strict=True)]
    if output is None:
        return [None] * rows
    raise AskedError(f"a model's output must have one row for each of {rows} items, but a part is {_shown(output)}")


def stack(outputs: Sequence[Any]) -> Any:
    """Stack outputs into one structure: tensors along a new first dimension, other values in lists.

    Raises AskedError if tensors differ in shape.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        shapes = sorted({tuple(output.shape) for output in outputs})
        if len(shapes) > 1:
            raise AskedError(
                f"outputs differ in shape and cannot be stacked: {shapes[:3]}; use list() instead of stack()"
            )
        return torch.stack(list(outputs))
    if isinstance(first, Mapping):
        return {key: stack([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        return _like(first, [stack(column) for column in zip(*outputs, strict=True)])
    return list(outputs)


def _is_leaf(values: Sequence[Any]) -> bool:
    """Return True for a list of one value per row, as default_collate returns strings."""
    kinds = SINGLE if isinstance(values, list) else (str, bytes)
    return bool(values) and all(isinstance(value, kinds) for value in values)


def _like(original: Any, values: list[Any]) -> Any:
    if hasattr(original, "_fields"):  # a named tuple
        return type(original)(*values)
    return tuple(values) if isinstance(original, tuple) else values


def _shown(output: Any) -> str:
    is_tensor = isinstance(output, torch.Tensor)
    return f"a tensor of shape {tuple(output.shape)}" if is_tensor else f"of type {type(output).__name__}"
