"""Rows of batches and outputs of any structure: dicts, tuples and lists of tensors, strings and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from duoka.errors import AskedError

SINGLE = (str, bytes, int, float, complex, bool, type(None))


def count(batch: Any) -> int | None:
    """Return the number of rows of a batch, by its first tensor or list; None if it has none."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else None
    if isinstance(batch, Mapping):
        return _first(batch.values())
    if isinstance(batch, (tuple, list)):
        return len(batch) if _is_leaf(batch) else _first(batch)
    return None


def partition(batch: Any, start: int, stop: int, rows: int) -> Any:
    """Slice a batch of `rows` rows. Leaves with another number of rows stay whole."""

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


def split(output: Any, rows: int | None) -> list[Any]:
    """Split an output into one for each row, in the same structure. Rows are views of the batch.

    Args:
        output: of a model.
        rows: required number of rows; None takes the number found.

    Raises:
        AskedError: the output does not have one row for each item.
    """
    found = count(output) if rows is None else rows
    if found is None:
        raise AskedError(f"a model's output must have one row for each item, but it is {_shown(output)}")
    return _rows(output, found)


def stack(outputs: Sequence[Any]) -> Any:
    """Stack outputs into one structure: tensors along a new first dimension, other values in lists.

    Raises:
        AskedError: tensors differ in shape.
    """
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        shapes = {tuple(output.shape) for output in outputs}
        if len(shapes) > 1:
            found = sorted(shapes)[:3]
            raise AskedError(f"outputs differ in shape and cannot be stacked: {found}; use list() instead of stack()")
        return torch.stack(list(outputs))
    if isinstance(first, Mapping):
        return {key: stack([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        return _like(first, [stack(column) for column in zip(*outputs, strict=True)])
    return list(outputs)


def _rows(output: Any, rows: int) -> list[Any]:
    if isinstance(output, torch.Tensor) and output.dim() and output.size(0) == rows:
        return list(output.unbind(0))
    if isinstance(output, Mapping):
        columns = [_rows(value, rows) for value in output.values()]
        return [dict(zip(output, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(output, (tuple, list)):
        if _is_leaf(output) and len(output) == rows:
            return list(output)
        columns = [_rows(value, rows) for value in output]
        return [_like(output, list(row)) for row in zip(*columns, strict=True)]
    if output is None:
        return [None] * rows
    raise AskedError(f"a model's output must have one row for each of {rows} items, but a part is {_shown(output)}")


def _is_leaf(values: Sequence[Any]) -> bool:
    """Return True for a list of one value per row, as default_collate returns strings."""
    kinds = SINGLE if isinstance(values, list) else (str, bytes)
    return bool(values) and all(isinstance(value, kinds) for value in values)


def _like(original: Any, values: list[Any]) -> Any:
    if hasattr(original, "_fields"):  # a named tuple
        return type(original)(*values)
    return tuple(values) if isinstance(original, tuple) else values


def _first(values: Any) -> int | None:
    return next((rows for value in values if (rows := count(value)) is not None), None)


def _shown(output: Any) -> str:
    shape = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
    return shape or f"of type {type(output).__name__}"
