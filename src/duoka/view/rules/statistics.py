"""Norms, variances and standard deviations over the batch: ranks exchange those of their rows, and no rows.

Variances are combined as in BatchNorm: a sum of squares would lose the digits of one that is small beside the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from duoka.view.rules.batch_norm import combined
from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs
from duoka.view.tensor.spec import Spec
from duoka.view.view import View

_IN_16_BITS = (torch.float16, torch.bfloat16)  # computed in 32, and rounded once


def order_of(func: Function, args: Args, kwargs: Kwargs, matrices: bool) -> Any:
    """Return the order of a vector norm. matrices: torch.linalg.norm would compute a norm of matrices."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p"))
    if func is torch.linalg.norm and order is not None and matrices:
        return "of matrices"
    return 2 if order is None or (order == "fro" and func is not torch.linalg.norm) else order


def whole_norm(
    batch: BatchTensor, order: Any, dtype: torch.dtype | None, dims: list[int] | None, keepdim: bool
) -> Tensor | None:
    """Compute the vector norm of a batch over dimensions that include the batch; see `whole_norms`."""
    view = batch._spec.view
    if view.gradient_norms is None or dims is not None or keepdim or not _is_exchanged([batch], order):
        norms = whole_norms([batch], order, dtype, dims, keepdim)
        return None if norms is None else norms[0]
    result = (dtype or batch.dtype).to_real()
    norm = view.gradient_norms.of(
        batch,
        (order, dtype),
        lambda rows: _part_of_norm(rows, 0, order, dtype),
        lambda parts: [norm.to(result) for norm in _exchange(parts, order, view)],
    )
    return whole_norms([batch], order, dtype)[0] if norm is None else norm  # type: ignore[index]


def whole_norms(
    batches: Sequence[BatchTensor],
    order: Any,
    dtype: torch.dtype | None = None,
    dims: list[int] | None = None,
    keepdim: bool = False,
) -> list[Tensor] | None:
    """Compute the vector norm of each batch over dimensions that include the batch: one all-gather of norms.

    batches: at least one, all of one `View` and device. dims: None: all. Returns None if the norm of the norms of
    ranks' rows is not that of the batch.
    """
    if not _is_exchanged(batches, order):
        return None
    view = batches[0]._spec.view
    dtypes = [(dtype or batch.dtype).to_real() for batch in batches]
    if 2 <= order < inf and torch.is_grad_enabled() and any(batch._rows.requires_grad for batch in batches):
        # Not the norm of norms: the second gradient of a norm of rows that are all zero is NaN.
        powers = [_sum_of_powers(batch._local, order, dtype, dims, keepdim) for batch in batches]
        totals = _unpacked(view.all_sum(_packed(powers)), powers)
        return [_root(view, total, order, of) for total, of in zip(totals, dtypes, strict=True)]
    parts = [_part_of_norm(batch._local, batch._spec.dim, order, dtype, dims, keepdim) for batch in batches]
    return [norm.to(of) for norm, of in zip(_exchange(parts, order, view), dtypes, strict=True)]


def _is_exchanged(batches: Sequence[BatchTensor], order: Any) -> bool:
    """Return whether the norm of the norms of ranks' rows is that of the batch; torch raises for integers."""
    if isinstance(order, bool) or not isinstance(order, (int, float)) or not order > 0:
        return False
    return all(batch.dtype.is_floating_point or batch.dtype.is_complex for batch in batches)


def _exchange(parts: Sequence[Tensor], order: float, view: View) -> list[Tensor]:
    """Return the norms of whole tensors, for those of this rank's rows."""
    return _unpacked(torch.linalg.vector_norm(_of_ranks(_packed(parts), view), order, dim=0), parts)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return what was packed, in the shapes of `like`."""
    if len(like) == 1:
        return [packed]
    ends = accumulate(of.numel() for of in like)  # slices: `norm.clamp_(1e-6)` is refused for results of `split`
    return [packed[end - of.numel() : end].view_as(of) for end, of in zip(ends, like, strict=True)]


def _part_of_norm(
    rows: Tensor,
    dim: int,
    order: float,
    dtype: torch.dtype | None,
    dims: list[int] | None = None,
    keepdim: bool = False,
) -> Tensor:
    """Return the norm of this rank's rows, which are along `dim`; 0 if it has none, where torch has no maximum."""
    dtype = _computed_in(rows, dtype)
    if not rows.shape[dim]:
        every = list(range(rows.dim())) if dims is None else dims
        return torch.sum(rows.abs(), every, keepdim, dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(rows, order, dims, keepdim, dtype=dtype)
    return norm


def _computed_in(rows: Tensor, dtype: torch.dtype | None) -> torch.dtype | None:
    return torch.float32 if dtype is None and rows.dtype in _IN_16_BITS else dtype


def _sum_of_powers(
    rows: Tensor, order: float, dtype: torch.dtype | None, dims: list[int] | None, keepdim: bool
) -> Tensor:
    rows = rows.to(_computed_in(rows, dtype))
    if order == 2:
        powers = (rows * rows.conj()).real if rows.is_complex() else rows.square()
    else:
        powers = rows.abs().pow(order)
    return powers.sum(list(range(rows.dim())) if dims is None else dims, keepdim)


SPREADS = ("var", "std", "var_mean", "std_mean")


def correction_of(args: Args, kwargs: Kwargs) -> float:
    """Return the number that is subtracted from the count, from `correction` or `unbiased`."""
    if (correction := kwargs.get("correction")) is not None:
        return float(correction)
    unbiased = kwargs.get("unbiased", next((value for value in args[1:3] if isinstance(value, bool)), True))
    return float(unbiased)


def spread(name: str, batch: BatchTensor, dims: list[int] | None, keepdim: bool, correction: float) -> Any:
    """Compute one of SPREADS over dimensions that include the batch: one all-gather of two values per result."""
    spec, part = batch._spec, batch._local
    every = list(range(part.dim())) if dims is None else dims
    beside = prod(part.shape[dim] for dim in every if dim != spec.dim) * spec.outer * spec.inner
    counts = [rows * beside for rows in spec.partition.sizes]
    if not part.is_floating_point() or sum(counts) <= correction:
        return NotImplemented  # torch raises or warns
    var_and_mean = spec.view.shares.recorded(_VarMean.apply, part, every, keepdim)
    var, mean = _combined(var_and_mean, counts, spec)
    var = var * (sum(counts) / (sum(counts) - correction))
    first = _root(spec.view, var, 2, part.dtype) if name.startswith("std") else var.to(part.dtype)
    return (first, mean.to(part.dtype)) if name.endswith("_mean") else first


class _VarMean(torch.autograd.Function):
    """The variance and the mean of local rows, which may be none; in 64 bits on a CPU, as torch computes them.

    It saves the rows, as torch's functions do, and no copy in 64 bits: a write to them before the backward pass is an
    error.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dims: list[int], keepdim: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows)
        ctx.dims, ctx.keepdim = dims, keepdim
        dense = _dense(rows)
        if not rows.numel():
            return dense.sum(dims, keepdim), dense.sum(dims, keepdim)
        return torch.var_mean(dense, dims, correction=0, keepdim=keepdim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        dense, dims = _dense(rows), ctx.dims
        count = prod(rows.shape[dim] for dim in dims)
        for dim in sorted(dims) if not ctx.keepdim else ():
            grads = tuple(grad.unsqueeze(dim) for grad in grads)
        of_var, of_mean = grads
        return ((dense - dense.mean(dims, True)) * 2 * of_var + of_mean).div(max(count, 1)).to(rows.dtype), None, None


def _dense(rows: Tensor) -> Tensor:
    return rows.to(torch.float64 if rows.is_cpu or rows.dtype == torch.float64 else torch.float32)


def _combined(var_and_mean: tuple[Tensor, ...], counts: list[int], spec: Spec) -> tuple[Tensor, Tensor]:
    """Combine this rank's variance and mean with those of the other ranks. counts: values of each rank."""
    variances, means = _of_ranks(torch.stack(var_and_mean), spec.view).unbind(1)
    fractions = torch.tensor(counts, dtype=means.dtype, device=means.device) / sum(counts)
    mean, var = combined(means, variances, fractions)
    return var, mean


class _Root(torch.autograd.Function):
    """The root of an order, in `dtype`. Its gradient is torch's of a norm or a standard deviation: 0 at 0.

    It saves its result, as theirs do: a write to a norm before the backward pass is an error, and a hook on the norm
    gets what a second derivative adds to the gradient.
    """

    @staticmethod
    def forward(ctx: Any, powers: Tensor, order: float, dtype: torch.dtype) -> Tensor:
        root = (powers.sqrt() if order == 2 else powers.pow(1 / order)).to(dtype)
        ctx.dtype, ctx.order = powers.dtype, order
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (root,) = ctx.saved_tensors
        slope = root * 2 if ctx.order == 2 else root.pow(ctx.order - 1) * ctx.order
        return (grads[0] / slope).masked_fill(root == 0, 0).to(ctx.dtype), None, None


def _root(view: View, powers: Tensor, order: float, dtype: torch.dtype) -> Tensor:
    """Return the root of an order, in one call where calls are recorded: the gradient is not that of `sqrt`."""
    return view.shares.recorded(_Root.apply, powers, order, dtype)  # type: ignore[no-any-return]


def _of_ranks(values: Tensor, view: View) -> Tensor:
    """Return the values of each rank, along a new first dimension, with gradients."""
    ranks = view.ranks
    return Spec(view, Partition(ranks.world_size, ranks.rank, ranks.world_size)).gather(values.unsqueeze(0))
