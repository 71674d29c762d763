"""Rules for functions that mix the entries along some dimensions only, of which the batch is none: a table.

Matrices, spectra, windows, sorting, pieces. All other tensors among the arguments are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.private.torch import tree_leaves
from duoka.view.rules.lookup import (
    NotByRows,
    align,
    argument,
    from_left,
    functions,
    localise,
    ndim_of,
    rows_in,
    same_rows,
    shape_of,
    sizes_of,
    wrap,
)
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule

Mixed = Callable[[Args, Kwargs, int], Iterable[Any] | None]  # of a call: the dimensions it mixes


def apart(mixed: Mixed, tensors: float = 0) -> Rule:
    """Make a rule for a function of one batch, its first argument, that mixes only some dimensions.

    mixed: returns them for a call, of a batch of so many dimensions; None if they are not known. The result lacks
    them if it has fewer dimensions. tensors: the largest number of dimensions of the other tensors.
    """

    def rule(func: Function, args: Args, kwargs: Kwargs) -> Any:
        batch = args[0] if args else None
        others = [value for value in tree_leaves((args[1:], kwargs)) if isinstance(value, Tensor)]
        if not isinstance(batch, BatchTensor) or any(isinstance(value, BatchTensor) for value in others):
            return NotImplemented
        dims = mixed(args, kwargs, ndim_of(batch))
        if dims is None or any(value.dim() > tensors for value in others):
            return NotImplemented
        return rows_apart(func, args, kwargs, from_left(dims, ndim_of(batch)))

    return rule


def rows_apart(func: Function, args: Args, kwargs: Kwargs, dims: list[int]) -> Any:
    """Call a function of a batch, its first argument, on the local rows. dims: those that it mixes, from the left."""
    batch, spec = args[0], args[0]._spec
    if spec.dim in dims:
        return NotImplemented
    out = func(batch._local, *args[1:], **kwargs)
    if out is batch._rows and func.__name__.endswith("_"):
        return batch
    if not isinstance(out, Tensor) and not out:  # the pieces of a dimension of size 0
        return out
    first = out if isinstance(out, Tensor) else out[0]
    dropped = sum(dim < spec.dim for dim in set(dims)) if first.dim() < ndim_of(batch) else 0
    return wrap(out, spec.at(spec.dim - dropped))


def these(*dims: int) -> Mixed:
    """Return a function that selects these dimensions."""
    return lambda args, kwargs, ndim: dims


def last(count: int) -> Mixed:
    """Return a function that selects the last `count` dimensions."""
    return lambda args, kwargs, ndim: range(max(ndim - count, 0), ndim)


def dims_from(index: int, name: str = "dim", default: Any = None) -> Mixed:
    """Return a function that selects the dimension or dimensions in an argument."""

    def mixed(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[Any] | None:
        dims = argument(args, kwargs, index, name, default)
        return [dims] if isinstance(dims, int) else dims if isinstance(dims, (tuple, list)) else None

    return mixed


def _all_but(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[int]:
    """Return the dimensions other than that of renorm(p, dim, maxnorm)."""
    return set(range(ndim)) - {argument(args, kwargs, 2, "dim") % ndim}


def _lengths_or_dims(args: Args, kwargs: Kwargs, ndim: int) -> Iterable[Any] | None:
    """Return the dimensions of fftn(x, s, dim): as many as there are lengths, if only these are given."""
    lengths = argument(args, kwargs, 1, "s")
    if argument(args, kwargs, 2, "dim") is None and isinstance(lengths, (list, tuple)):
        return range(ndim - len(lengths), ndim)
    return dims_from(2)(args, kwargs, ndim)


def of_matrices(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A function of stacks of matrices (or vectors), with the same rows in the same leading dimension."""
    sides = args[:2]
    spec = next((side._spec for side in sides if isinstance(side, BatchTensor)), None)
    rest = (*args[2:], *kwargs.values())
    if spec is None or len(sides) < 2 or any(isinstance(value, Tensor) for value in rest):
        return NotImplemented
    if spec.dim >= min(ndim_of(side) for side in sides if isinstance(side, BatchTensor)) - 1:
        return NotImplemented
    if spec.dim >= max(map(ndim_of, sides)) - 2:  # rows or columns of a single matrix
        return NotImplemented
    if isinstance(args[0], BatchTensor) and spec.dim >= ndim_of(args[0]) - 2:
        return NotImplemented
    fewer = isinstance(sides[1], BatchTensor) and ndim_of(sides[1]) < ndim_of(sides[0])
    if fewer and shape_of(sides[1]) != shape_of(sides[0])[:-1]:  # a matrix, no stack of vectors
        return NotImplemented
    local = [_stacked(side, spec.dim, max(map(ndim_of, sides)), spec) for side in sides]
    return wrap(func(*local, *args[2:], **kwargs), spec)


def _stacked(side: Tensor, dim: int, longest: int, spec: Any) -> Tensor:
    """Return an operand's rows, or a single matrix, which is replicated.

    Raises:
        NotByRows: it does not hold the same rows.
    """
    if isinstance(side, BatchTensor):
        if side._spec.dim != dim or not same_rows(side._spec, spec):
            raise NotByRows
        return side._local
    if side.dim() == 2 and longest > 3:  # of fewer dimensions it could be a stack of vectors
        return side
    if side.dim() != longest:
        raise NotByRows
    return rows_in(side, spec, dim) if side.shape[dim] != 1 else side


def by_elements_along(index: int, default: int | None) -> Rule:
    """cross and vecdot: of operands that broadcast, along one dimension."""

    def rule(func: Function, args: Args, kwargs: Kwargs) -> Any:
        spec, right = align(args[:2])
        dim = argument(args, kwargs, index, "dim", default)
        if not isinstance(dim, int) or len(args) < 2:
            return NotImplemented
        ndim = max(ndim_of(side) for side in args[:2])
        if ndim - dim % ndim == right:
            return NotImplemented
        local = [localise(side, spec, right) for side in args[:2]]
        out = func(*local, *args[2:], **kwargs)
        summed_behind = out.dim() < ndim and dim % ndim > ndim - right
        return BatchTensor(out, spec.at(out.dim() - right + summed_behind))

    return rule


def integral(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """trapezoid(y, x, dim), with an x for each row, or the same for all."""
    batch, dim = args[0], argument(args, kwargs, 3, "dim", -1)
    places = argument(args, kwargs, 1, "x")
    if not isinstance(batch, BatchTensor) or dim % ndim_of(batch) == batch._spec.dim:
        return NotImplemented
    spec = batch._spec
    if isinstance(places, Tensor) and ndim_of(places) > 1:
        places = localise(places, spec, ndim_of(batch) - spec.dim)
    elif isinstance(places, BatchTensor):
        return NotImplemented
    named = {**kwargs, "dim": dim} if places is None else {"x": places, "dim": dim}
    out = func(batch._local, **named)
    return BatchTensor(out, spec.at(spec.dim - (out.dim() < ndim_of(batch) and dim % ndim_of(batch) < spec.dim)))


LAST_TWO = """
tril triu cholesky cholesky_ex cholesky_inverse det slogdet logdet inverse inv inv_ex pinv pinverse
matrix_exp matrix_power matrix_rank qr svd svdvals eigh eigvals eigvalsh lu lu_factor lu_factor_ex ldl_factor
ldl_factor_ex geqrf
"""
LAST_TWO_OF_BOTH = (
    "cholesky_solve lu_solve solve_ex solve_triangular triangular_solve householder_product orgqr ldl_solve"
)
_SPACES, _BOTH, _ALL = (Tensor, torch, torch.linalg), (Tensor, torch), (Tensor, torch, F, torch.special)

# Names, where they are found, what is mixed, and the dimensions of other tensors.
_TABLE: tuple[tuple[str, tuple[Any, ...], Mixed, int], ...] = (
    (LAST_TWO, _SPACES, last(2), 0),
    ("cond eig", (torch.linalg,), last(2), 0),  # others in torch itself
    ("fft ifft rfft irfft hfft ihfft", (torch.fft,), dims_from(2, "dim", -1), 0),
    ("fft2 ifft2 rfft2 irfft2 hfft2 ihfft2", (torch.fft,), dims_from(2, "dim", (-2, -1)), 0),
    ("fftn ifftn rfftn irfftn hfftn ihfftn", (torch.fft,), _lengths_or_dims, 0),
    ("fftshift ifftshift", (torch.fft,), dims_from(1), 0),
    ("stft", _BOTH, last(1), 1),
    ("istft", _BOTH, last(2), 1),
    ("view_as_complex_copy", (torch,), last(1), 0),
    ("view_as_real_copy", (torch,), these(), 0),
    ("fliplr", _BOTH, these(1), 0),
    ("flipud msort", _BOTH, these(0), 0),
    ("roll", _BOTH, dims_from(2, "dims"), 0),
    ("flip", _BOTH, lambda args, kwargs, ndim: sizes_of(args, kwargs, "dims"), 0),
    ("rot90", _BOTH, dims_from(2, "dims", (0, 1)), 0),
    ("unfold unfold_copy", (Tensor,), dims_from(1, "dimension"), 0),
    ("unfold_copy", (torch,), dims_from(1, "dimension"), 0),
    ("gradient", (torch,), dims_from(9), 1),
    ("renorm renorm_", _BOTH, _all_but, 0),
    ("softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin", _ALL, dims_from(1), 0),
    ("sort argsort glu", _ALL, dims_from(1, "dim", -1), 0),
    ("topk diff", _ALL, dims_from(2, "dim", -1), 0),
    ("normalize", _ALL, dims_from(2, "dim", 1), 0),
    ("fake_quantize_per_tensor_affine", (torch,), these(), 1),
    ("fake_quantize_per_channel_affine", (torch,), dims_from(3, "axis"), 1),
)

RULES: dict[Function, Rule] = {
    **{func: apart(mixed, tensors) for names, spaces, mixed, tensors in _TABLE for func in functions(names, spaces)},
    **dict.fromkeys(functions(LAST_TWO_OF_BOTH, _SPACES), of_matrices),
    **dict.fromkeys(functions("solve", (torch.linalg,)), of_matrices),
    **dict.fromkeys(functions("cross", _BOTH), by_elements_along(2, None)),
    **dict.fromkeys(functions("cross vecdot", (torch.linalg,)), by_elements_along(2, -1)),
    **dict.fromkeys(functions("trapezoid trapz cumulative_trapezoid", (torch,)), integral),
}
