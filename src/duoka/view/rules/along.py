"""Rules for gather, scatter and similar functions that select entries along a dimension other than the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duoka.view.rules.lookup import NotByRows, argument, functions, localise, ndim_of, rows_in, shape_of
from duoka.view.rules.packing import select_rows
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule

READING = "gather take_along_dim index_select scatter scatter_add scatter_reduce"
WRITING = "scatter_ scatter_add_ scatter_reduce_"


def along(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Select entries of rows by indices that are rows, along a dimension other than the batch."""
    batch = args[0] if args else None
    by_rows = func not in _BY_POSITION
    dim = argument(args, kwargs, 1 if func not in _DIM_LAST else 2, "dim")
    if func in _GATHERING and isinstance(batch, Tensor) and not isinstance(batch, BatchTensor):
        return _from_plain(func, batch, dim, argument(args, kwargs, 2, "index"), kwargs)
    if not isinstance(batch, BatchTensor) or not isinstance(dim, int):
        return NotImplemented
    spec, right = batch._spec, ndim_of(batch) - batch._spec.dim
    if dim % ndim_of(batch) == spec.dim:
        return NotImplemented if by_rows else select_rows(func, args, kwargs)

    def local(value: Any) -> Any:
        if not isinstance(value, Tensor) or not by_rows:
            return value
        if ndim_of(value) != ndim_of(batch) or shape_of(value)[spec.dim] != spec.size:
            raise NotByRows  # positions for some of the rows only
        if isinstance(value, BatchTensor) and (value._spec.partition, value._spec.dim) != (spec.partition, spec.dim):
            raise NotByRows
        return localise(value, spec, right)

    if not by_rows and any(isinstance(value, BatchTensor) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    rows = [local(value) for value in args[1:]], {name: local(value) for name, value in kwargs.items()}
    return BatchTensor(func(batch._local, *rows[0], **rows[1]), spec)


def _from_plain(func: Function, table: Tensor, dim: Any, index: Any, kwargs: Kwargs) -> Any:
    """Compute `table.gather(dim, ids)` of a replicated table, by indices that are rows."""
    if not isinstance(index, BatchTensor) or kwargs.keys() - {"dim", "index"} or not table.dim():
        return NotImplemented
    spec = index._spec
    if dim % table.dim() == spec.dim:
        return BatchTensor(func(table, dim, index._local), spec)
    return BatchTensor(func(rows_in(table, spec, spec.dim), dim, index._local), spec)


_GATHERING = functions("gather")
_BY_POSITION = functions("index_select")  # the same positions for each row
_DIM_LAST = functions("take_along_dim")


def along_in_place(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """As `along`, writing to the local rows."""
    done = along(func, args, kwargs)
    return done if done is NotImplemented else args[0]


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(READING, (Tensor, torch)), along),
    **dict.fromkeys(functions(WRITING, (Tensor,)), along_in_place),
}
