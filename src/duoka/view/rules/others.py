"""Rules for operations along dimensions other than the batch: matrices, spectra, windows, integrals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from duoka.private.torch import tree_leaves
from duoka.view.rules.lookup import (
    Function,
    NotByRows,
    align,
    argument,
    functions,
    localise,
    ndim_of,
    rows_in,
    same_rows,
    shape_of,
    sizes_of,
    wrap,
)
from duoka.view.tensor.batch import BatchTensor, Rule

Mixed = Callable[[tuple[Any, ...], dict[str, Any], int], Iterable[int] | None]  # of a call: the dimensions it mixes

LAST_TWO = """
tril triu cholesky cholesky_ex cholesky_inverse det slogdet logdet inverse inv inv_ex pinv pinverse
matrix_exp matrix_power matrix_rank qr svd svdvals eigh eigvals eigvalsh lu lu_factor lu_factor_ex ldl_factor
ldl_factor_ex geqrf
"""
LAST_TWO_OF_BOTH = (
    "cholesky_solve lu_solve solve_ex solve_triangular triangular_solve householder_product orgqr ldl_solve"
)
SPECTRA = "fft ifft rfft irfft hfft ihfft"
SPECTRA_OF_TWO = "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2"
SPECTRA_OF_ALL = "fftn ifftn rfftn irfftn hfftn ihfftn fftshift ifftshift"


def apart(mixed: Mixed, beside: int = 0) -> Rule:
    """Make a rule for a function of one batch that mixes only some dimensions.

    beside: the largest number of dimensions of the other tensor arguments, which must be plain tensors.
    """

    def rule(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = args[0] if args else None
        others = tree_leaves((args[1:], kwargs))
        if not isinstance(batch, BatchTensor) or any(isinstance(value, BatchTensor) for value in others):
            return NotImplemented
        if any(isinstance(value, Tensor) and value.dim() > beside for value in others):
            return NotImplemented
        spec, ndim = batch._spec, ndim_of(batch)
        dims = mixed(args, kwargs, ndim)
        if dims is None:
            return NotImplemented
        dims = {dim % ndim for dim in dims}
        if spec.dim in dims:
            return NotImplemented
        rest = [spec.view.replicate(value) if isinstance(value, Tensor) else value for value in args[1:]]
        named = {n: spec.view.replicate(value) if isinstance(value, Tensor) else value for n, value in kwargs.items()}
        out = func(batch._local, *rest, **named)
        first = out if isinstance(out, Tensor) else out[0]
        gone = sum(dim < spec.dim for dim in dims) if first.dim() < ndim else 0  # summed dimensions are removed
        return wrap(out, spec.at(spec.dim - gone))

    return rule


def last(count: int) -> Mixed:
    """Return a function that selects the last `count` dimensions."""
    return lambda args, kwargs, ndim: range(ndim - count, ndim) if ndim >= count else None


def dims_from(index: int, name: str, default: Any = None) -> Mixed:
    """Return a function that selects the dimension or dimensions in an argument."""

    def mixed(args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> Iterable[int] | None:
        dims = argument(args, kwargs, index, name, default)
        if dims is None or isinstance(dims, int):
            return None if dims is None else [dims]
        return list(dims) if all(isinstance(dim, int) for dim in dims) else None

    return mixed


def _flipped(args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> Iterable[int] | None:
    """Return the dimensions of flip(dims) and flip(*dims)."""
    return sizes_of(args, kwargs, "dims")


def _lengths_or_dims(args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> Iterable[int] | None:
    """Return the dimensions of fftn(x, s, dim): as many as there are lengths, if only these are given."""
    lengths = argument(args, kwargs, 1, "s")
    if argument(args, kwargs, 2, "dim") is None and isinstance(lengths, (list, tuple)):
        return range(ndim - len(lengths), ndim)
    return dims_from(2, "dim")(args, kwargs, ndim)


def of_matrices(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        replicated: Tensor = spec.view.replicate(side)
        return replicated
    if side.dim() != longest:
        raise NotByRows
    return rows_in(side, spec, dim) if shape_of(side)[dim] != 1 else spec.view.replicate(side)


def by_elements_along(index: int, default: int | None) -> Rule:
    """cross and vecdot: of operands that broadcast, along one dimension."""

    def rule(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def integral(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def renorm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """renorm(p, dim, maxnorm), for each row."""
    batch, dim = args[0], argument(args, kwargs, 2, "dim")
    if not isinstance(batch, BatchTensor) or dim % ndim_of(batch) != batch._spec.dim:
        return NotImplemented
    out = func(batch._local, *args[1:], **kwargs)
    return batch if out is batch._local else BatchTensor(out, batch._spec)


def short_time_spectrum(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """stft of (n, L), and istft of (n, F, T)."""
    batch = args[0]
    if not isinstance(batch, BatchTensor) or ndim_of(batch) < (3 if func.__name__ == "istft" else 2):
        return NotImplemented
    return apart(last(2 if func.__name__ == "istft" else 1), beside=1)(func, args, kwargs)


_SPACES = (Tensor, torch, torch.linalg)

RULES: dict[Function, Rule] = {
    **dict.fromkeys(functions(LAST_TWO, _SPACES), apart(last(2))),
    **dict.fromkeys(functions(LAST_TWO_OF_BOTH, _SPACES), of_matrices),
    **dict.fromkeys(functions("cond eig", (torch.linalg,)), apart(last(2))),  # others in torch itself
    **dict.fromkeys(functions("solve", (torch.linalg,)), of_matrices),
    **dict.fromkeys(functions(SPECTRA, (torch.fft,)), apart(dims_from(2, "dim", -1))),
    **dict.fromkeys(functions(SPECTRA_OF_TWO, (torch.fft,)), apart(dims_from(2, "dim", (-2, -1)))),
    **dict.fromkeys(functions(SPECTRA_OF_ALL, (torch.fft,)), apart(_lengths_or_dims)),
    **dict.fromkeys(functions("fftshift ifftshift", (torch.fft,)), apart(dims_from(1, "dim"))),
    **dict.fromkeys(functions("view_as_complex view_as_complex_copy", (torch,)), apart(last(1))),
    **dict.fromkeys(functions("view_as_real view_as_real_copy", (torch,)), apart(lambda args, kwargs, ndim: [])),
    **dict.fromkeys(functions("fliplr", (Tensor, torch)), apart(lambda args, kwargs, ndim: [1])),
    **dict.fromkeys(functions("flipud msort", (Tensor, torch)), apart(lambda args, kwargs, ndim: [0])),
    **dict.fromkeys(functions("roll", (Tensor, torch)), apart(dims_from(2, "dims"))),
    **dict.fromkeys(functions("flip", (Tensor, torch)), apart(_flipped)),
    **dict.fromkeys(functions("rot90", (Tensor, torch)), apart(dims_from(2, "dims", (0, 1)))),
    **dict.fromkeys(functions("unfold unfold_copy", (Tensor,)), apart(dims_from(1, "dimension"))),
    **dict.fromkeys(functions("unfold_copy", (torch,)), apart(dims_from(1, "dimension"))),
    **dict.fromkeys(functions("gradient", (torch,)), apart(dims_from(9, "dim"), beside=1)),
    **dict.fromkeys(functions("stft istft", (Tensor, torch)), short_time_spectrum),
    **dict.fromkeys(functions("cross", (Tensor, torch)), by_elements_along(2, None)),
    **dict.fromkeys(functions("cross vecdot", (torch.linalg,)), by_elements_along(2, -1)),
    **dict.fromkeys(functions("trapezoid trapz cumulative_trapezoid", (torch,)), integral),
    **dict.fromkeys(functions("renorm renorm_", (Tensor, torch)), renorm),
}
