"""Rules for what selects entries of every row: `x[:, 0]`, `x[torch.arange(n), lengths - 1]`, `table[ids]`, gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import getweakrefs

import numpy as np
import torch
from torch import Tensor

from duoka.private.torch import count_users, set_version, version_of
from duoka.view.memory import holders
from duoka.view.rules.blocks import blocks_of
from duoka.view.rules.lookup import (
    NotByRows,
    align,
    argument,
    dtype_of,
    functions,
    in_place,
    localise,
    ndim_of,
    rows_in,
    same_rows,
    shape_of,
)
from duoka.view.rules.recurrent import select_rows
from duoka.view.shares.layout import laid_out
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule
from duoka.view.tensor.spec import Spec

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class _Walk:
    """An index, item by item, and what becomes of one dimension."""

    items: tuple[Any, ...]
    kept_dim: int | None  # where the dimension is, if a slice takes all of it
    chosen: int | None  # the place, among the items, of the tensor that chooses along it
    positions: tuple[int, ...]  # of the dimensions that tensors index, once whole numbers have dropped theirs
    tensor_dims: int  # of these tensors, broadcast
    ndim: int  # of the result

    @property
    def _side_by_side(self) -> bool:
        return self.positions[-1] - self.positions[0] == len(self.positions) - 1

    @property
    def start(self) -> int:
        """Return where the dimensions of index tensors are in the result: in place, or first if not adjacent."""
        return self.positions[0] if self._side_by_side else 0

    @property
    def result_dim(self) -> int:
        """Return the index of the dimension in the result."""
        assert self.kept_dim is not None
        if not self.positions or (self._side_by_side and self.kept_dim < self.positions[0]):
            return self.kept_dim
        return self.kept_dim - sum(position < self.kept_dim for position in self.positions) + self.tensor_dims


def _walk(index: Any, shape: tuple[int, ...], dim: int) -> _Walk | None:
    """Analyse an index of a tensor of this shape, and what becomes of `dim`; None if it is not supported."""
    items = spelled_out(index if isinstance(index, tuple) else (index,), len(shape))
    if items is None:
        return None
    source = position = dimensions = 0
    kept_dim = chosen = None
    positions: list[int] = []
    for at, item in enumerate(items):
        if item is None:
            position += 1
            continue
        here, width = source <= dim < source + width_of(item), width_of(item)
        source += width
        if isinstance(item, Tensor) and ndim_of(item):
            positions += range(position, position + width)
            dimensions = max(dimensions, 1 if dtype_of(item) == torch.bool else ndim_of(item))
            chosen = at if here else chosen
            position += width
        elif isinstance(item, slice):
            if here and item.indices(shape[dim]) != (0, shape[dim], 1):
                return None
            if here:
                items[at], kept_dim = _ALL, position
            position += 1
        elif here:
            return None
    return _Walk(tuple(items), kept_dim, chosen, tuple(positions), dimensions, position - len(positions) + dimensions)


def width_of(item: Any) -> int:
    """Return the number of dimensions that an item indexes."""
    return ndim_of(item) if isinstance(item, Tensor) and dtype_of(item) == torch.bool else 1


def spelled_out(items: Sequence[Any], ndim: int) -> list[Any] | None:
    """Replace the ellipsis (or the missing end) of an index by full slices, and lists by tensors."""
    items = [_as_tensor(item) for item in items]
    if any(item is NotImplemented for item in items):
        return None
    used = sum(width_of(item) for item in items if item is not None and item is not Ellipsis)
    at = next((number for number, item in enumerate(items) if item is Ellipsis), len(items))
    return [*items[:at], *[_ALL] * (ndim - used), *items[at + 1 :]]


def _as_tensor(item: Any) -> Any:
    """Convert an item that indexes like a tensor to a tensor; NotImplemented if it is not supported."""
    if item is None or item is Ellipsis or type(item) in (int, slice):
        return item
    if isinstance(item, (list, range)):
        if not all(type(entry) is int for entry in item):
            return NotImplemented
        return torch.tensor(list(item), dtype=torch.long)
    if isinstance(item, np.ndarray):
        item = torch.as_tensor(item)
    if isinstance(item, np.integer):
        return int(item)
    if not isinstance(item, Tensor) or dtype_of(item) not in (torch.long, torch.int, torch.bool):
        return NotImplemented
    return NotImplemented if dtype_of(item) == torch.bool and not ndim_of(item) else item


@dataclass(frozen=True, slots=True)
class _Local:
    """Return the index of the local rows for one of the whole batch. dim: of the batch in the result, of `ndim`."""

    items: tuple[Any, ...]
    dim: int
    ndim: int


def _of_rows(batch: BatchTensor, index: Any) -> _Local | None:
    """Analyse an index of a batch; None unless it keeps every row."""
    spec = batch._spec
    walk = _walk(index, shape_of(batch), spec.dim)
    if walk is None:
        return None
    if walk.chosen is not None:
        return _one_for_each(walk, spec)
    if any(isinstance(item, BatchTensor) and dtype_of(item) == torch.bool for item in walk.items):
        return None
    replicated = [item.full_tensor() if isinstance(item, BatchTensor) else item for item in walk.items]
    return _Local(tuple(replicated), walk.result_dim, walk.ndim)


def _one_for_each(walk: _Walk, spec: Spec) -> _Local | None:
    """Compute `x[torch.arange(n), ids]`: in each row the entries at its own ids."""
    assert walk.chosen is not None
    rows, tensors = walk.items[walk.chosen], [item for item in walk.items if isinstance(item, Tensor)]
    if isinstance(rows, BatchTensor) or any(dtype_of(item) == torch.bool for item in tensors):
        return None
    if rows.numel() != spec.size or spec.size not in rows.shape:
        return None
    if not torch.equal(rows.flatten().cpu(), torch.arange(spec.size, dtype=rows.dtype)):
        return None
    at = list(rows.shape).index(spec.size)
    right = rows.dim() - at
    positions = torch.arange(spec.local_size, device=rows.device).view(
        [-1 if d == at else 1 for d in range(rows.dim())]
    )
    items = [localise(item, spec, right) for item in walk.items]
    items[walk.chosen] = positions  # of which the tensor may be another item, too: x[i, i]
    return _Local(tuple(items), walk.start + walk.tensor_dims - right, walk.ndim)


def getitem(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `x[index]` of rows, or of a replicated table by indices that are rows."""
    batch, index = args
    if not isinstance(batch, BatchTensor):
        return _looked_up(batch, index)
    local = _of_rows(batch, index)
    if local is not None and any(isinstance(item, Tensor) and item.dtype == torch.bool for item in local.items):
        return _chosen_by_masks(batch, local)
    if local is not None:
        return BatchTensor(batch._local[local.items], batch._spec.at(local.dim))
    items = spelled_out(index if isinstance(index, tuple) else (index,), ndim_of(batch))
    if items is not None and items[1:] == [_ALL] * (ndim_of(batch) - 1):
        return blocks_of(tuple(items), batch)
    return NotImplemented


def _chosen_by_masks(batch: BatchTensor, local: _Local) -> Any:
    """Compute `x[:, mask]` by the numbers of what the mask chooses, as its count decides about strides."""
    numbers: list[Any] = []
    dim = 0
    for item in local.items:
        if isinstance(item, Tensor) and item.dtype == torch.bool:
            if item.shape != shape_of(batch)[dim : dim + item.dim()]:
                return NotImplemented  # computed whole, it raises torch's error
            numbers += item.nonzero(as_tuple=True)
        else:
            numbers.append(item)
        dim += 0 if item is None else width_of(item)
    if (recorder := batch._spec.view.shares.recorder) is not None:
        recorder.abandon()  # another mask has another count
    return batch[tuple(numbers)]


def _looked_up(table: Tensor, index: Any) -> Any:
    """Compute `table[ids]` of a replicated table."""
    walk = _walk(index, tuple(table.shape), -1)
    if walk is None or any(isinstance(item, Tensor) and dtype_of(item) == torch.bool for item in walk.items):
        return NotImplemented
    spec, right = align(walk.items)
    items = tuple(localise(item, spec, right) for item in walk.items)
    return BatchTensor(table[items], spec.at(walk.start + walk.tensor_dims - right))


def setitem(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Write to every row: `x[:, 0] = 0`, `x[..., 1:] = y`, `x[torch.arange(n), ids] = 1`, `x[x < 0] = 0`."""
    batch, index, value = args
    if not isinstance(batch, BatchTensor) and not _becomes_rows(batch, index, value):
        return NotImplemented
    if isinstance(index, BatchTensor) and dtype_of(index) == torch.bool:
        return _masked(batch, index, value)
    local = _of_rows(batch, index)
    if local is None:
        return NotImplemented
    local_value = localise(value, batch._spec, local.ndim - local.dim)
    batch._local[local.items] = local_value
    return None


def _becomes_rows(plain: Tensor, index: Any, value: Any) -> bool:
    """Convert a plain tensor to a batch when rows are first written to it: `out = zeros(T, n); out[t] = h`.

    No other tensor may share its memory, and the written rows must be at the batch's rows.
    """
    if not isinstance(value, BatchTensor) or value._spec.view.shares.several or type(plain) is not Tensor:
        return False
    spec, right = value._spec, ndim_of(value) - value._spec.dim
    if plain.requires_grad or plain.is_inference() or plain.dtype != dtype_of(value):
        return False
    for dim, size in enumerate(plain.shape):
        walk = _walk(index, tuple(plain.shape), dim) if size == spec.size else None
        if walk is not None and walk.kept_dim is not None and walk.ndim - walk.result_dim == right:
            # What is garbage may have been collected on another rank only.
            if spec.view.shares.processes.is_true_anywhere(spec.view.saved.holds(plain) or _is_shared(plain)):
                return False
            placement = spec.at(dim)
            strides = placement.strides_of(plain)
            with torch.inference_mode(False):  # of which it is no tensor
                rows = laid_out(placement.local_rows(plain).clone(), placement.local_strides(strides))
                set_version(rows, version_of(plain))
                torch.utils.swap_tensors(plain, BatchTensor(rows, placement, strides))
            return True
    return False


def _is_shared(plain: Tensor) -> bool:
    """Return whether something else refers to a tensor, or to its memory."""
    if holders(plain) > 1 or not plain.untyped_storage().resizable():  # a numpy array shares it
        return True
    return count_users(plain) > 0 or bool(getweakrefs(plain))


def _masked(batch: BatchTensor, mask: BatchTensor, value: Any) -> Any:
    """Write where a mask of the same rows is True."""
    if mask._spec.dim != batch._spec.dim or not same_rows(mask._spec, batch._spec):
        return NotImplemented
    if isinstance(value, BatchTensor) or (isinstance(value, Tensor) and value.dim() > ndim_of(batch) - ndim_of(mask)):
        return NotImplemented
    batch._local[mask._local] = value
    return None


def put(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute `x.index_put(indices, values, accumulate)` and `index_put_`, as `x[indices] = values`."""
    if len(args) < 3 or not isinstance(args[0], BatchTensor):
        return NotImplemented
    batch, indices, values = args[:3]
    local = _of_rows(batch, tuple(indices))
    if local is None:
        return NotImplemented
    local_values = localise(values, batch._spec, local.ndim - local.dim)
    out = func(batch._local, local.items[: len(indices)], local_values, *args[3:], **kwargs)
    return batch if out is batch._rows else BatchTensor(out, batch._spec)


def at_positions(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """index_add, index_copy, index_fill, index_reduce along another dimension, at the same positions of each row."""
    if len(args) < 3 or not isinstance(args[0], BatchTensor) or not isinstance(args[1], int):
        return NotImplemented
    batch, dim, index, *rest = args
    spec = batch._spec
    if dim % ndim_of(batch) == spec.dim:
        return NotImplemented
    named = {name: value for name, value in kwargs.items() if name not in ("source", "value")}
    source = rest[0] if rest else kwargs.get("source", kwargs.get("value"))
    if isinstance(source, Tensor) and ndim_of(source):
        source = rows_in(source, spec, spec.dim)
    positions = index.full_tensor() if isinstance(index, BatchTensor) else index
    out = func(batch._local, dim, positions, source, *rest[1:], **named)
    return batch if out is batch._rows else BatchTensor(out, spec)


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


RULES: dict[Function, Rule] = {
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
    **dict.fromkeys(functions("index_put index_put_", (Tensor, torch)), put),
    **dict.fromkeys(
        functions("index_add index_copy index_fill index_reduce", (Tensor, torch))
        + functions("index_add_ index_copy_ index_fill_ index_reduce_", (Tensor,)),
        at_positions,
    ),
    **dict.fromkeys(
        functions("gather take_along_dim index_select scatter scatter_add scatter_reduce", (Tensor, torch)), along
    ),
    **dict.fromkeys(functions("scatter_ scatter_add_ scatter_reduce_", (Tensor,)), in_place(along)),
}
