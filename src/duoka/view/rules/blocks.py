"""Rules for tensors with several blocks of the same rows in one dimension: repeat, cat, split.

`torch.cat([z1, z2])` of two batches of n rows has 2 blocks of n rows: in `Spec`, `outer` is 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from duoka.view.rules.lookup import NotByRows, align, argument, dtype_of, from_left, functions, shape_of, sizes_of
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule
from duoka.view.tensor.spec import Spec


def repeat(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """repeat and tile; along the batch this gives more blocks."""
    batch = args[0]
    times = sizes_of(args, kwargs, "dims" if func in _TILES else "repeats")
    if not isinstance(batch, BatchTensor) or batch.numel() == 0 or 0 in times:
        return NotImplemented
    times = [1] * (batch.dim() - len(times)) + times if func in _TILES else times
    if len(times) < batch.dim():
        return NotImplemented  # torch raises the error
    dim = batch._spec.dim + len(times) - batch.dim()
    spec = replace(batch._spec, dim=dim, outer=batch._spec.outer * times[dim])
    return BatchTensor(batch._local.repeat(times), spec)


_TILES = functions("tile", (Tensor, torch))


def repeat_interleave(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """repeat_interleave(a number, dim); along the batch this gives more entries for each row."""
    batch, spec = args[0], args[0]._spec
    times, dim = argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
    if not isinstance(times, int) or not isinstance(dim, int) or times == 0:
        return NotImplemented
    along = dim % batch.dim() == spec.dim
    out = batch._local.repeat_interleave(times, dim)
    return BatchTensor(out, replace(spec, inner=spec.inner * times) if along else spec)


def join_results(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """cat and stack of the same rows; along the batch this gives blocks."""
    tensors, dim = args[0] if args else kwargs["tensors"], argument(args, kwargs, 1, "dim", kwargs.get("axis", 0))
    stacking = func is torch.stack
    if not stacking:
        tensors = _without_nothing(tensors)
    spec, _ = align(tensors)
    (dim,) = from_left([dim], tensors[0].dim() + stacking)
    ndims = {tensor.dim() for tensor in tensors}
    if len(ndims) > 1 or any(tensor.shape[spec.dim] != spec.size for tensor in tensors):
        return NotImplemented
    rows = [tensor._local if isinstance(tensor, BatchTensor) else spec.local_rows(tensor) for tensor in tensors]
    if not stacking and dim == spec.dim:
        return BatchTensor(torch.cat(rows, dim), replace(spec, outer=spec.outer * len(rows)))
    return BatchTensor(func(rows, dim), spec.at(spec.dim + (stacking and dim <= spec.dim)))


def _without_nothing(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Leave out `torch.tensor([])`, which torch's cat ignores except for its type."""
    some = [tensor for tensor in tensors if shape_of(tensor) != (0,)]
    types = {dtype_of(tensor) for tensor in some}
    nothing = {dtype_of(tensor) for tensor in tensors} - types
    same = all(torch.promote_types(dtype, other) == other for dtype in nothing for other in types)
    return some if same else list(tensors)


def split(batch: BatchTensor, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """chunk and split along the batch into whole blocks."""
    spec = batch._spec
    of = func(torch.empty(batch.shape, device="meta"), *args[1:], **kwargs)
    sizes = [piece.shape[spec.dim] for piece in of]
    specs = [spec_of_blocks(spec, size) for size in sizes]
    counts = [piece.local_size for piece in specs]
    if func in _NOT_WRITTEN:
        pieces = batch._local.split(counts, spec.dim)
    else:
        starts = accumulate(counts, initial=0)
        pieces = [batch._local.narrow(spec.dim, start, count) for start, count in zip(starts, counts, strict=False)]
    return type(of)(map(BatchTensor, pieces, specs))


# Autograd refuses writes to one of their results.
_NOT_WRITTEN = functions("chunk split split_with_sizes", (Tensor, torch))


def spec_of_blocks(spec: Spec, size: int) -> Spec:
    """Return the placement of the first `size` entries; raise NotByRows unless these are whole blocks."""
    blocks, rest = divmod(size, spec.partition.n * spec.inner)
    if rest or blocks < 1:  # a slice may end before it starts
        raise NotByRows
    return replace(spec, outer=blocks)


def blocks_of(items: tuple[Any, ...], batch: BatchTensor) -> Any:
    """Index whole blocks: `z[:n]`, `z[n:]`."""
    spec = batch._spec
    item = items[0]
    if spec.dim != 0 or not isinstance(item, slice) or item.step not in (None, 1):
        return NotImplemented
    start, stop, _ = item.indices(spec.size)
    piece, before = spec_of_blocks(spec, stop - start), divmod(start, spec.partition.n * spec.inner)
    if before[1]:
        return NotImplemented
    first = before[0] * spec.partition.rows * spec.inner
    return BatchTensor(batch._local.narrow(0, first, piece.local_size), piece)


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions("repeat tile", (Tensor, torch)), repeat),
    **dict.fromkeys(functions("cat concat concatenate stack", (torch,)), join_results),
}
