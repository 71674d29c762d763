"""Rules for reductions: over other dimensions local, over the batch with an all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from duoka.private.torch import TRUTHS
from duoka.view.rules import statistics
from duoka.view.rules.apart import rows_apart
from duoka.view.rules.lookup import argument, from_left, functions
from duoka.view.rules.pointwise import pointwise
from duoka.view.shares.layout import DenseGradient
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule

ALONG = """
sum mean nansum nanmean prod max min amax amin aminmax argmax argmin any all norm std var std_mean var_mean
logsumexp median nanmedian mode count_nonzero quantile nanquantile kthvalue
"""


def reduce(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute a reduction over some or all dimensions of a batch."""
    batch, name = args[0], _name_of(func)
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return pointwise(func, args, kwargs)
    if not isinstance(batch, BatchTensor) or any(
        isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())
    ):
        return NotImplemented
    dims, keepdim = _dims_of(name, batch, args, kwargs)
    dims = dims and from_left(dims, batch.dim())
    if dims is None or (batch._spec.dim in dims):
        if name in statistics.SPREADS:
            return statistics.spread(name, batch, dims, keepdim, statistics.correction_of(args, kwargs))
        if name in ("norm", "vector_norm"):
            order = statistics.order_of(func, args, kwargs, matrices=(batch.dim() if dims is None else len(dims)) > 1)
            norm = statistics.whole_norm(batch, order, kwargs.get("dtype"), dims, keepdim)
            return NotImplemented if norm is None else norm
        over = _OVER_THE_BATCH.get(name)
        return NotImplemented if over is None else over(batch, dims, keepdim, kwargs.get("dtype"))
    return rows_apart(func, args, kwargs, dims)


def truths(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Compute whether all or any truth values are true, by a function that takes nothing else."""
    is_known = not kwargs and isinstance(args[0], BatchTensor) and args[0].dtype is torch.bool
    return reduce(TRUTHS[func], args, kwargs) if is_known else NotImplemented


def _name_of(func: Function) -> str:
    return str(func.__name__).removeprefix("special_").removeprefix("linalg_")


def _dims_of(name: str, batch: BatchTensor, args: Args, kwargs: Kwargs) -> tuple[list[int] | None, bool]:
    """Return the reduced dimensions (None: all) and keepdim, from wherever the function takes them."""
    index = 2 if name in _DIM_SECOND else 1
    dim = argument(args, kwargs, index, "dim", kwargs.get("axis", _DIM_OF.get(name)))
    of_spread = name in statistics.SPREADS
    if of_spread and isinstance(dim, bool):  # unbiased, of everything
        dim = None
    keepdim = bool(argument(args, kwargs, index + (2 if of_spread else 1), "keepdim", False))
    if dim is None or dim == () or dim == []:
        return None, keepdim
    dims = dim if isinstance(dim, (tuple, list)) else [dim]
    return list(dims), keepdim


_DIM_SECOND = ("norm", "quantile", "nanquantile", "kthvalue", "vector_norm", "matrix_norm")
_DIM_OF = {"mode": -1, "kthvalue": -1, "matrix_norm": (-2, -1)}  # by default, not all dimensions


def _dense(part: Tensor, dims: list[int] | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Sum this rank's rows, in 32 bits for 16-bit types, whose sum may overflow."""
    if dtype is None and part.dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    every = list(range(part.dim())) if dims is None else dims
    return torch.sum(part, dim=every, keepdim=keepdim, dtype=dtype)


def _restored(total: Tensor, batch: BatchTensor, dtype: torch.dtype | None) -> Tensor:
    short = dtype is None and batch._local.dtype in (torch.float16, torch.bfloat16)
    return total.to(batch._local.dtype) if short else total


def whole_sum(batch: BatchTensor, dims: list[int] | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Sum over dimensions that include the batch: one all-reduce."""
    total = batch._spec.view.all_sum(_dense(batch._local, dims, keepdim, dtype))
    return _restored(total, batch, dtype)


def whole_mean(batch: BatchTensor, dims: list[int] | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """Mean over dimensions that include the batch: one all-reduce."""
    kind = dtype or batch.dtype
    if not (kind.is_floating_point or kind.is_complex):
        return torch.mean(batch._local, dtype=dtype)  # raises
    view = batch._spec.view
    rows = view.shares.recorded(DenseGradient.apply, batch._local) if batch._local.requires_grad else batch._local
    total = view.all_sum(_dense(rows, dims, keepdim, dtype))
    count = prod(batch.shape) if dims is None else prod(batch.shape[dim] for dim in dims)
    # Unlike `total / count`, it saves nothing that a second pass would miss.
    return _restored(torch.ops.aten.div.Scalar(total, count), batch, dtype)


def _counted(batch: BatchTensor, nonzero: Tensor, dims: list[int] | None, keepdim: bool) -> Tensor:
    return batch._spec.view.all_sum(_dense(nonzero, dims, keepdim, torch.long))


def _truth(batch: BatchTensor, truth: Tensor) -> Tensor:
    """Return truth values as `any` and `all` give them: of bytes, as bytes."""
    return truth.to(torch.uint8) if batch.dtype == torch.uint8 else truth


def _extreme(op: Any, func: Function) -> Any:
    """max or min of all entries, of integers or without a gradient; anything else is computed whole."""

    def over(batch: BatchTensor, dims: list[int] | None, keepdim: bool, dtype: torch.dtype | None) -> Any:
        if dims is not None or batch._local.is_floating_point() or batch._local.dtype == torch.bool:
            return NotImplemented
        return batch._spec.view.ranks.all_reduce(func(batch._local).clone(), op).data  # which has counted no write

    return over


_OVER_THE_BATCH: dict[str, Callable[..., Any]] = {
    "sum": whole_sum,
    "mean": whole_mean,
    "any": lambda batch, dims, keepdim, dtype: _truth(batch, _counted(batch, batch._local != 0, dims, keepdim) > 0),
    "all": lambda batch, dims, keepdim, dtype: _truth(batch, _counted(batch, batch._local == 0, dims, keepdim) == 0),
    "count_nonzero": lambda batch, dims, keepdim, dtype: _counted(batch, batch._local != 0, dims, False),
    "max": _extreme(ReduceOp.MAX, torch.max),
    "min": _extreme(ReduceOp.MIN, torch.min),
}


RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(ALONG, (Tensor, torch, torch.special)), reduce),
    **dict.fromkeys(functions("norm vector_norm matrix_norm", (torch.linalg,)), reduce),
    **dict.fromkeys(TRUTHS, truths),
}
