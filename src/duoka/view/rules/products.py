"""Matrix products and layers computed sample by sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.batch import BatchTensor, Rule, Spec
from duoka.view.rules.lookup import Function, argument, functions, same_rows, wrap


def matmul(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Left rows times a right side that every rank holds whole, products sample by sample, sums over the batch."""
    if len(args) != 2 or kwargs or not all(isinstance(side, Tensor) for side in args):
        return NotImplemented
    left, right = args if func is not Tensor.__rmatmul__ else reversed(args)
    if isinstance(left, BatchTensor) and left._spec.dim < left.dim() - 1:
        return _rows_of_the_left(left, right)
    if left.dim() > 2 or right.dim() > 2:
        return NotImplemented
    summed = [side._spec.dim == place for side, place in ((left, left.dim() - 1), (right, 0)) if _is_batch(side)]
    if all(summed):
        return _summed_over_the_batch(left, right)
    if _is_batch(left) or right._spec.dim == 0:
        return NotImplemented
    out = right._spec.view.enter(left) @ right._local
    return BatchTensor(out, right._spec.at(out.dim() - 1))


def _is_batch(side: Tensor) -> bool:
    return isinstance(side, BatchTensor)


def _rows_of_the_left(left: BatchTensor, right: Tensor) -> Any:
    spec, ndim = left._spec, left.dim()
    if isinstance(right, BatchTensor) and ndim == right.dim() > 2 and spec.dim < ndim - 2:
        if spec.dim == right._spec.dim and same_rows(spec, right._spec):
            return BatchTensor(left._local @ right._local, spec)
        return NotImplemented
    if right.dim() > 2:
        return NotImplemented
    whole = right.full_tensor() if isinstance(right, BatchTensor) else right
    return BatchTensor(left._local @ spec.view.enter(whole), spec)


def _summed_over_the_batch(left: Tensor, right: Tensor) -> Any:
    """`a.T @ b`: each rank's part of the sum, added up."""
    spec = next(side._spec for side in (left, right) if isinstance(side, BatchTensor))
    if any(isinstance(side, BatchTensor) and not same_rows(side._spec, spec) for side in (left, right)):
        return NotImplemented
    if left.shape[-1] != spec.size or right.shape[0] != spec.size:
        return NotImplemented
    own = [
        side._local if isinstance(side, BatchTensor) else spec.own(side, dim)
        for side, dim in ((left, left.dim() - 1), (right, 0))
    ]
    return spec.view.all_sum(own[0] @ own[1])


def every_pair(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """outer and cdist: each row of the left side with all of the right, which is held whole."""
    left, right = args[:2]
    if not isinstance(left, BatchTensor) or left._spec.dim != 0 or left.dim() != right.dim() or left.dim() > 2:
        return NotImplemented
    spec = left._spec
    whole = spec.view.enter(right.full_tensor() if isinstance(right, BatchTensor) else right)
    return BatchTensor(func(left._local, whole, *args[2:], **kwargs), spec)


def einsum(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """einsum of rows with rows, plain tensors, or all rows of another batch; a letter says where the batch is."""
    equation = args[0]
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(equation, str) or "." in equation:
        return NotImplemented
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    if not arrow:
        output = "".join(sorted(letter for letter in set(inputs) - {","} if inputs.count(letter) == 1))
    if [len(names) for names in letters] != [operand.dim() for operand in operands]:
        return NotImplemented
    first = next(place for place, operand in enumerate(operands) if isinstance(operand, BatchTensor))
    spec, letter = operands[first]._spec, letters[first][operands[first]._spec.dim]
    try:
        own = [_by_letter(operand, names, letter, spec) for operand, names in zip(operands, letters, strict=True)]
    except LookupError:
        return NotImplemented
    out = func(equation, own)
    return BatchTensor(out, spec.at(output.index(letter))) if letter in output else spec.view.all_sum(out)


def _by_letter(operand: Tensor, names: str, letter: str, spec: Spec) -> Tensor:
    """An operand of einsum where `letter` is this rank's rows. Raises LookupError."""
    if names.count(letter) > 1:
        raise LookupError
    if letter not in names:
        return spec.view.enter(operand.full_tensor() if isinstance(operand, BatchTensor) else operand)
    dim = names.index(letter)
    if operand.shape[dim] != spec.size:
        raise LookupError
    if isinstance(operand, BatchTensor):
        if operand._spec.dim == dim and same_rows(operand._spec, spec):
            return operand._local
        return spec.own(operand.full_tensor(), dim)
    return spec.own(operand, dim)


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
    keeps = argument(args, kwargs, 1, "running_mean") is not None
    if keeps and argument(args, kwargs, 5, "use_input_stats", True):
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
    """The first argument is rows; others are the same rows in the same place, or are held whole."""
    several = func in _OF_SEVERAL
    others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, BatchTensor)]
    if others and not (several and all(o._spec.dim == spec.dim and same_rows(o._spec, spec) for o in others)):
        return NotImplemented

    def own(value: Any) -> Any:
        if isinstance(value, BatchTensor) or not isinstance(value, Tensor):
            return value._local if isinstance(value, BatchTensor) else value
        if several and value.dim() == args[0].dim() and value.shape[spec.dim] == spec.size:
            return spec.own(value)
        return spec.view.enter(value)

    return wrap(func(*map(own, args), **{name: own(value) for name, value in kwargs.items()}), spec)


_BY_DIMS = {
    3: """conv1d conv_transpose1d max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d lp_pool1d fold
    max_pool1d_with_indices adaptive_max_pool1d_with_indices max_unpool1d""",
    4: """conv2d conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d lp_pool2d
    pixel_shuffle pixel_unshuffle unfold max_pool2d_with_indices adaptive_max_pool2d_with_indices max_unpool2d
    grid_sample""",
    5: """conv3d conv_transpose3d max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d lp_pool3d
    max_pool3d_with_indices adaptive_max_pool3d_with_indices max_unpool3d""",
}

# What takes several tensors of samples.
_OF_SEVERAL = functions("grid_sample max_unpool1d max_unpool2d max_unpool3d", (F,))

RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions("matmul mm bmm mv dot __matmul__ __rmatmul__", (Tensor, torch)), matmul),
    **dict.fromkeys(functions("outer ger cdist", (Tensor, torch)), every_pair),
    torch.einsum: einsum,
    F.linear: linear,
    **{func: samplewise(dims) for dims, names in _BY_DIMS.items() for func in functions(names, (torch, F))},
    **dict.fromkeys(
        functions("group_norm interpolate prelu channel_shuffle local_response_norm", (F, torch, Tensor)),
        samplewise(None),
    ),
    F.instance_norm: instance_norm,
    **dict.fromkeys(functions("layer_norm rms_norm", (F,)), layer_norm),
    **dict.fromkeys(functions("embedding one_hot", (F,)), embedding),
}
