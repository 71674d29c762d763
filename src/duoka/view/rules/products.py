"""Rules for matrix products, and for layers that compute sample by sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.rules.apart import Mixed, apart, last, these
from duoka.view.rules.lookup import (
    NotByRows,
    align,
    argument,
    from_left,
    functions,
    in_place,
    localise,
    ndim_of,
    rows_in,
    same_rows,
    shape_of,
)
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule, batches_in
from duoka.view.tensor.spec import Spec


def matmul(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Products of vectors, matrices and stacks of them, with torch's broadcasting."""
    if len(args) != 2 or kwargs or not all(isinstance(side, Tensor) for side in args):
        return NotImplemented
    if func in _OF_EQUAL_STACKS and shape_of(args[0])[:1] != shape_of(args[1])[:1]:
        return NotImplemented
    product = _product(*(args if func is not Tensor.__rmatmul__ else reversed(args)))
    out = (func if func is not Tensor.__rmatmul__ else torch.matmul)(product.left, product.right)
    spec = product.spec
    return spec.view.all_sum(out) if product.summed else BatchTensor(out, spec.at(out.dim() - product.from_right))


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of local rows. from_right: the batch dimension of the result. summed: whether it is all-reduced."""

    left: Tensor
    right: Tensor
    spec: Spec
    from_right: int
    summed: bool


# Roles of the batch dimension in an operand: summed over; the rows or columns of its matrices; or, as its place from
# the right (3 or more), a dimension of the stack of matrices.
_SUMMED, _LINES = 0, -1


def _product(left: Tensor, right: Tensor) -> _Product:
    """Return the local operands of a matmul."""
    roles = _role(left, 1), _role(right, 2)
    if roles[0] == roles[1] != _LINES and same_rows(left._spec, right._spec):  # type: ignore[attr-defined]
        return _Product(left._local, right._local, left._spec, roles[0] or 0, roles[0] == _SUMMED)  # type: ignore[attr-defined]
    if roles[0] is not None and roles[1] is not None:  # one operand is gathered, that with the summed dimension first
        if roles[0] == _SUMMED:
            return _product(_gathered(left), right)
        return _product(left, _gathered(right))
    batch, role, other = (left, roles[0], right) if roles[0] is not None else (right, roles[1], left)
    assert isinstance(batch, BatchTensor)
    spec, shape = batch._spec, tuple(other.shape)
    if role == _SUMMED:
        dim = len(shape) - 1 if other is left else max(len(shape) - 2, 0)
        if not shape or shape[dim] != spec.size:
            raise NotByRows
        from_right, part = 0, spec.local_rows(other, dim)
    elif role == _LINES:
        from_right, part = (1 if batch is right or len(shape) == 1 else 2), spec.view.replicate(other)
    else:
        # If the other side is a vector, the product lacks the last dimension.
        assert role is not None
        from_right = role - (len(shape) == 1)
        if len(shape) >= role and shape[-role] not in (1, spec.size):
            raise NotByRows
        of_rows = len(shape) >= role and shape[-role] == spec.size
        part = spec.local_rows(other, len(shape) - role) if of_rows else spec.view.replicate(other)
    sides = (batch._local, part) if batch is left else (part, batch._local)
    return _Product(*sides, spec, from_right, role == _SUMMED)


def _role(side: Tensor, summed: int) -> int | None:
    """Return the role of the batch in an operand: summed over, rows or columns, or a dimension of the stack."""
    if not isinstance(side, BatchTensor):
        return None
    from_right, ndim = ndim_of(side) - side._spec.dim, ndim_of(side)
    if ndim == 1 or from_right == summed:
        return _SUMMED
    return from_right if from_right > 2 else _LINES


def _gathered(side: Tensor) -> Tensor:
    return side.full_tensor() if isinstance(side, BatchTensor) else side


def added(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """addmm, baddbmm and addmv: a product and a summand."""
    if len(args) != 3 or kwargs.keys() - {"beta", "alpha"}:
        return NotImplemented
    beside, left, right = args
    if func in _OF_EQUAL_STACKS and shape_of(left)[:1] != shape_of(right)[:1]:
        return NotImplemented
    if not batches_in((left, right)) or (product := _product(left, right)).summed:
        return NotImplemented
    addend = localise(beside, product.spec, product.from_right)
    out = func(addend, product.left, product.right, **kwargs)
    return BatchTensor(out, product.spec.at(out.dim() - product.from_right))


def tensordot(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """tensordot(a, b, dims): rows of one side with all of the other, or a sum over rows of both."""
    left, right = args[:2]
    dims = argument(args, kwargs, 2, "dims", 2)
    if isinstance(dims, Tensor):
        return NotImplemented
    count = ndim_of(left), ndim_of(right)
    if isinstance(dims, int):
        dims = list(range(count[0] - dims, count[0])), list(range(dims))
    if len(dims) != 2 or not all(isinstance(side, (list, tuple)) for side in dims):
        return NotImplemented
    over = [from_left(side, ndim) for side, ndim in zip(dims, count, strict=True)]
    return _as_einsum(lambda equation, sides: func(*sides, over), left, right, *over)


def _as_einsum(func: Function, left: Tensor, right: Tensor, over_left: list[int], over_right: list[int]) -> Any:
    """Compute a tensordot by the rule for einsum. func: computes it of local sides, with torch's own strides."""
    for side, summed in ((left, over_left), (right, over_right)):
        if isinstance(side, BatchTensor) and side._spec.dim in summed and side._spec.partition.smallest < 2:
            return NotImplemented  # of dimensions of size 1 torch sums the other side first, and saves the sum
    letters = [chr(ord("a") + index) for index in range(ndim_of(left))]
    others = [chr(ord("A") + index) for index in range(ndim_of(right))]
    for dim, other in zip(over_left, over_right, strict=True):
        others[other] = letters[dim]
    free = [letter for index, letter in enumerate(letters) if index not in over_left]
    free += [letter for index, letter in enumerate(others) if index not in over_right]
    equation = f"{''.join(letters)},{''.join(others)}->{''.join(free)}"
    return einsum(func, (equation, left, right), {})


def inner(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """inner(a, b)."""
    left, right = args[:2]
    if not ndim_of(left) or not ndim_of(right):
        return left * right
    return _as_einsum(lambda equation, sides: func(*sides), left, right, [ndim_of(left) - 1], [ndim_of(right) - 1])


def every_pair(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """outer and cdist: the local rows of the left side with all rows of the right, which is gathered."""
    left, right = args[:2]
    if not isinstance(left, BatchTensor) or left._spec.dim != 0 or left.dim() != right.dim() or left.dim() > 2:
        return NotImplemented
    spec = left._spec
    columns = spec.view.replicate(right.full_tensor() if isinstance(right, BatchTensor) else right)
    return BatchTensor(func(left._local, columns, *args[2:], **kwargs), spec)


def einsum(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """einsum of rows with rows, plain tensors, or another batch, which is gathered."""
    equation = args[0]
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(equation, str):
        return NotImplemented
    letters, output = _spelled(equation.replace(" ", ""), [ndim_of(operand) for operand in operands])
    first = next(index for index, operand in enumerate(operands) if isinstance(operand, BatchTensor))
    spec, letter = operands[first]._spec, letters[first][operands[first]._spec.dim]
    local = [_by_letter(operand, names, letter, spec) for operand, names in zip(operands, letters, strict=True)]
    out = func(equation, local)
    return BatchTensor(out, spec.at(output.index(letter))) if letter in output else spec.view.all_sum(out)


def _spelled(equation: str, counts: list[int]) -> tuple[list[str], str]:
    """Return the letters of the operands and of the result, with new letters for an ellipsis."""
    inputs, arrow, output = equation.partition("->")
    if not arrow:
        single = sorted(letter for letter in set(inputs) - set(",.") if inputs.count(letter) == 1)
        output = ("..." if "." in inputs else "") + "".join(single)
    names = inputs.split(",")
    if len(names) != len(counts):
        raise NotByRows
    unused = [chr(code) for code in range(0x391, 0x3D0)]  # any that are not torch's
    widths = [count - len(name) + 3 if "." in name else 0 for name, count in zip(names, counts, strict=True)]
    if min(widths) < 0 or max(widths) > len(unused):
        raise NotByRows
    fill = "".join(unused[: max(widths)])
    spelled = [name.replace("...", fill[len(fill) - width :]) for name, width in zip(names, widths, strict=True)]
    if [len(name) for name in spelled] != counts:
        raise NotByRows
    return spelled, output.replace("...", fill)


def _by_letter(operand: Tensor, names: str, letter: str, spec: Spec) -> Tensor:
    """Return the local rows of an operand of einsum, along `letter`.

    Raises:
        NotByRows: it has other rows there.
    """
    if names.count(letter) > 1:
        raise NotByRows
    if letter not in names or shape_of(operand)[names.index(letter)] == 1 != spec.size:
        return spec.view.replicate(_gathered(operand))
    return rows_in(operand, spec, names.index(letter))


def bilinear(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """F.bilinear(rows, rows, weight, bias)."""
    spec, right = align(args[:2])
    if right < 2 or batches_in((args[2:], kwargs)) or shape_of(args[0])[:-1] != shape_of(args[1])[:-1]:
        return NotImplemented
    sides = [localise(side, spec, right) for side in args[:2]]
    return BatchTensor(func(*sides, *args[2:], **kwargs), spec)


def of_samples(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A layer of several tensors of samples, all with the batch in the first dimension."""
    values = (*args, *kwargs.values())
    spec, right = align(values)
    if any(len(shape_of(value)) != right for value in values if isinstance(value, Tensor)):
        return NotImplemented

    def rows(value: Any) -> Any:
        return rows_in(value, spec, 0) if isinstance(value, Tensor) else value

    return BatchTensor(func(*map(rows, args), **{name: rows(value) for name, value in kwargs.items()}), spec)


def _within_samples(dims: int | None) -> Mixed:
    """Select all but the first dimension of inputs of so many dimensions (None: any)."""

    def mixed(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[int] | None:
        return range(1, ndim) if ndim == dims or (dims is None and args[0]._spec.inner == 1) else None

    return mixed


def _grouped(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[int] | None:
    """Select what F.group_norm mixes, unless groups are single entries: of these it refuses a single row."""
    single = args[0].shape[1:].numel() == argument(args, kwargs, 1, "num_groups")
    return None if single else _within_samples(None)(args, kwargs, ndim)


def _instance(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[int] | None:
    """Select what F.instance_norm mixes, unless it keeps statistics of the whole batch."""
    keeps = argument(args, kwargs, 1, "running_mean") is not None
    if keeps and argument(args, kwargs, 5, "use_input_stats", True):
        return None
    return _within_samples(None)(args, kwargs, ndim)


def _normalised(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[int] | None:
    """Select what F.layer_norm and rms_norm mix."""
    return range(ndim - len(argument(args, kwargs, 1, "normalized_shape", ())), ndim)


def _looked_up(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[int] | None:
    """Select nothing for F.embedding, unless the table or its gradient depends on all rows."""
    depends = argument(args, kwargs, 3, "max_norm") is not None or argument(args, kwargs, 5, "scale_grad_by_freq")
    return None if depends else ()


def _classes(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[int] | None:
    """Select nothing for one_hot, unless it computes the number of classes."""
    return None if argument(args, kwargs, 1, "num_classes", -1) == -1 else ()


_BY_DIMS = {
    3: """conv1d conv_transpose1d max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d lp_pool1d fold
    max_pool1d_with_indices adaptive_max_pool1d_with_indices""",
    4: """conv2d conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d lp_pool2d
    pixel_shuffle pixel_unshuffle unfold max_pool2d_with_indices adaptive_max_pool2d_with_indices""",
    5: """conv3d conv_transpose3d max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d lp_pool3d
    max_pool3d_with_indices adaptive_max_pool3d_with_indices""",
}

_ANY_DIMS = "interpolate prelu channel_shuffle native_channel_shuffle local_response_norm"

_OF_EQUAL_STACKS = frozenset(functions("bmm baddbmm baddbmm_", (Tensor, torch)))  # without broadcasting
RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions("matmul mm bmm mv dot __matmul__ __rmatmul__", (Tensor, torch, torch.linalg)), matmul),
    **dict.fromkeys(functions("addmm baddbmm addmv", (Tensor, torch)), added),
    **dict.fromkeys(functions("addmm_ baddbmm_ addmv_", (Tensor,)), in_place(added)),
    torch.tensordot: tensordot,
    **dict.fromkeys(functions("inner", (Tensor, torch)), inner),
    **dict.fromkeys(functions("bilinear", (F, torch)), bilinear),
    **dict.fromkeys(functions("outer ger cdist", (Tensor, torch)), every_pair),
    torch.einsum: einsum,
    F.linear: apart(last(1), inf),
    **dict.fromkeys(functions("conv_tbc", (F, torch)), apart(these(0, 2), inf)),
    **{
        func: apart(_within_samples(dims), inf)
        for dims, names in _BY_DIMS.items()
        for func in functions(names, (torch, F))
    },
    **dict.fromkeys(functions(_ANY_DIMS, (F, torch, Tensor)), apart(_within_samples(None), inf)),
    **dict.fromkeys((F.max_unpool1d, F.max_unpool2d, F.max_unpool3d, F.grid_sample), of_samples),
    F.instance_norm: apart(_instance, inf),
    **dict.fromkeys(functions("group_norm", (F, torch)), apart(_grouped, inf)),
    **dict.fromkeys(functions("layer_norm rms_norm", (F, torch)), apart(_normalised, inf)),
    F.embedding: apart(_looked_up, inf),
    F.one_hot: apart(_classes, inf),
}
