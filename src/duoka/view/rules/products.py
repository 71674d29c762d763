"""Matrix products and layers computed sample by sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.batch import BatchTensor, Rule, Spec
from duoka.view.rules.lookup import Function, functions, same_rows, wrap


def matmul(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Left rows times a right side that every rank holds whole, or products sample by sample."""
    if len(args) != 2 or kwargs or not all(isinstance(side, Tensor) for side in args):
        return NotImplemented
    left, right = args
    if not isinstance(left, BatchTensor):
        return NotImplemented
    spec, ndim = left._spec, left.dim()
    if spec.dim == ndim - 1:
        return _summed_over_the_batch(func, left, right)
    if isinstance(right, BatchTensor) and ndim == right.dim() > 2 and spec.dim < ndim - 2:
        if spec.dim == right._spec.dim and same_rows(spec, right._spec):
            return BatchTensor(func(left._local, right._local), spec)
        return NotImplemented
    if right.dim() > 2:
        return NotImplemented
    whole = right.full_tensor() if isinstance(right, BatchTensor) else right
    return BatchTensor(func(left._local, spec.view.enter(whole)), spec)


def _summed_over_the_batch(func: Function, left: BatchTensor, right: Tensor) -> Any:
    """`a.T @ b`: each rank's part of the sum, added up."""
    if not isinstance(right, BatchTensor) or not left.dim() == right.dim() == 2 or right._spec.dim != 0:
        return NotImplemented
    if not same_rows(left._spec, right._spec):
        return NotImplemented
    return left._spec.view.all_sum(func(left._local, right._local))


def linear(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.linear(rows, weight, bias)."""
    batch = args[0] if args else None
    if not isinstance(batch, BatchTensor) or batch._spec.dim == batch.dim() - 1:
        return NotImplemented
    return _with_parameters(func, args, kwargs, batch._spec)


def samplewise(dims: int | None) -> Rule:
    """A layer over a batch in dimension 0; `dims`: how many dimensions its input has with the batch."""

    def layer(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = args[0] if args else None
        if not isinstance(batch, BatchTensor) or batch._spec.dim != 0:
            return NotImplemented
        if (dims is not None and batch.dim() != dims) or (batch._spec.inner != 1 and dims is None):
            return NotImplemented
        return _with_parameters(func, args, kwargs, batch._spec)

    return layer


def instance_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.instance_norm, unless it keeps statistics of the whole batch."""
    if kwargs.get("running_mean") is not None and kwargs.get("use_input_stats", True):
        return NotImplemented
    return samplewise(None)(func, args, kwargs)


def layer_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.layer_norm and rms_norm over the last dimensions, the batch not among them."""
    batch = args[0] if args else None
    normalised = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
    if not isinstance(batch, BatchTensor) or batch._spec.dim >= batch.dim() - len(normalised):
        return NotImplemented
    return _with_parameters(func, args, kwargs, batch._spec)


def embedding(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.embedding(ids, table) and one_hot: a dimension more at the end."""
    batch = args[0] if args else None
    if not isinstance(batch, BatchTensor) or kwargs.get("max_norm") is not None or kwargs.get("scale_grad_by_freq"):
        return NotImplemented  # the table, or its gradient, depends on all rows
    if func is F.one_hot and (kwargs.get("num_classes", args[1] if len(args) > 1 else -1)) == -1:
        return NotImplemented  # the number of classes would be told by the rows
    return _with_parameters(func, args, kwargs, batch._spec)


def _with_parameters(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], spec: Spec) -> Any:
    """The first argument is rows; every other tensor is held whole and meets them."""
    others = (*args[1:], *kwargs.values())
    if any(isinstance(value, BatchTensor) for value in others):
        return NotImplemented

    def entered(value: Any) -> Any:
        return spec.view.enter(value) if isinstance(value, Tensor) else value

    out = func(args[0]._local, *map(entered, args[1:]), **{name: entered(value) for name, value in kwargs.items()})
    return wrap(out, spec)


_BY_DIMS = {
    3: "conv1d conv_transpose1d max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d lp_pool1d",
    4: """conv2d conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d lp_pool2d
    pixel_shuffle pixel_unshuffle unfold""",
    5: "conv3d conv_transpose3d max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d",
}

RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions("matmul mm bmm __matmul__", (Tensor, torch)), matmul),
    F.linear: linear,
    **{func: samplewise(dims) for dims, names in _BY_DIMS.items() for func in functions(names, (torch, F))},
    **dict.fromkeys(functions("group_norm interpolate prelu", (F,)), samplewise(None)),
    F.instance_norm: instance_norm,
    **dict.fromkeys(functions("layer_norm rms_norm", (F,)), layer_norm),
    **dict.fromkeys(functions("embedding one_hot", (F,)), embedding),
}
