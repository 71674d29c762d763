"""Torch functions that may raise for the values of some rows: an index out of range, an integer divided by zero.

Only the rank with such a row gets the error, and the script may catch it and continue. So after each of these
functions the ranks exchange one number, whether any has failed. If so, all compute the function whole and raise the
error of one device. GPUs check indices asynchronously and end the process, so they need no exchange.

`embedding` is asked again and again for the same indices: once a batch's are known to be in range, nothing is
exchanged until they are written to.

A function that writes in place has written to some rows when it meets such an index. So the ranks compare whether
its indices are in range before it writes; computed whole, it then leaves what one device leaves.

Why: docs/decisions/0118-errors-of-some-rows.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.rules.indexing import spelled_out, width_of
from duoka.view.rules.lookup import argument, dtype_of, functions, shape_of
from duoka.view.tensor.batch import Args, BatchTensor, Kwargs, rows_by_share

_LABELS = "cross_entropy nll_loss multi_margin_loss multilabel_margin_loss"
_INDEXING = "embedding embedding_bag take_along_dim take one_hot max_unpool1d max_unpool2d max_unpool3d"
_ALONG = "gather index_select scatter scatter_add scatter_reduce index_add index_copy"
_ALONG_IN_PLACE = "scatter_ scatter_add_ scatter_reduce_ index_add_ index_copy_ index_fill_ index_reduce_"
_MATRICES = """
cholesky cholesky_inverse inverse inv solve eig eigh eigvals eigvalsh svd svdvals pinv lu lu_factor ldl_factor lstsq
matrix_rank cond tensorinv tensorsolve
"""
_DIVISIONS = "floor_divide remainder fmod lcm __floordiv__ __mod__ div divide"
_DIVISIONS_BY_SELF = "__rfloordiv__ __rmod__"
_DIVISIONS_IN_PLACE = "floor_divide_ remainder_ fmod_ lcm_ __ifloordiv__ __imod__ div_ divide_"

BY_ITEM = (Tensor.__getitem__, Tensor.__setitem__)
_BY_ITEMS = frozenset({*BY_ITEM, *functions("index_put index_put_")})
_BY_DIM = frozenset(functions(f"{_ALONG} {_ALONG_IN_PLACE}"))
_BY_LABEL = frozenset(functions(_LABELS))
_INDEXED_IN_PLACE = frozenset({Tensor.__setitem__, *functions(f"index_put_ {_ALONG_IN_PLACE}")})
_BY_INDEX = _BY_ITEMS.union(_BY_DIM, _BY_LABEL, functions(_INDEXING))
_DIVIDED_IN_PLACE = frozenset(functions(_DIVISIONS_IN_PLACE))
_DIVISOR_FIRST = frozenset(functions(_DIVISIONS_BY_SELF))
_DIVIDED = frozenset(functions(_DIVISIONS)) | _DIVISOR_FIRST | _DIVIDED_IN_PLACE
WRITES_ROWS = _INDEXED_IN_PLACE | _DIVIDED_IN_PLACE
_BY_VALUE = frozenset({F.binary_cross_entropy, F.gaussian_nll_loss})
_BY_MATRIX = frozenset(functions(_MATRICES, (Tensor, torch, torch.linalg)))
# Of functions that draw: the position and the name of the argument that may hold an invalid probability.
_BY_PROBABILITY: dict[Any, tuple[int, str]] = {
    **dict.fromkeys(functions("bernoulli multinomial", (Tensor, torch)), (0, "input")),
    torch.normal: (1, "std"),
}
RAISES_FOR_ROWS = _BY_INDEX | _BY_VALUE | _BY_MATRIX | _DIVIDED | _BY_PROBABILITY.keys()


def may_fail(func: Any, args: Args, batches: Sequence[BatchTensor], kwargs: dict[str, Any] | None = None) -> bool:
    """Return True if a function of RAISES_FOR_ROWS can raise an error for some rows of the batches in `args`.

    kwargs: None if the arguments by name are not known.
    """
    if func in _BY_MATRIX:
        return True
    if batches[0].device.type != "cpu":
        return False
    if func in _DIVIDED:
        unknown = {"rounding_mode": "floor"} if kwargs is None else kwargs
        return (kwargs is None and len(args) < 2) or _divisor(func, args, unknown) is not None
    if func in _BY_PROBABILITY:
        return isinstance(argument(args, kwargs or {}, *_BY_PROBABILITY[func]), BatchTensor)
    if func is F.embedding and len(args) > 1 and _is_known_to_fit(args[0], args[1]):
        return False
    if func in _BY_ITEMS or func in _BY_DIM:  # of an index that all ranks have, each takes its rows
        return (kwargs is None and len(args) < 3 and func is not Tensor.__getitem__) or any(
            isinstance(index, BatchTensor) or _is_outside(index, values)
            for index, values in _indices(func, args, kwargs or {})
        )
    if func in _BY_LABEL:
        return (kwargs is None and len(args) < 2) or any(map(_is_index, (*args, *(kwargs or {}).values())))
    return func in _BY_VALUE or any(map(_is_index, batches))


def note_range(indices: Tensor, end: int) -> None:
    """Note that all values of a batch, of every rank, are in range(end)."""
    if type(indices) is BatchTensor:
        rows = indices._rows
        indices._range = rows, indices._meta.spec.view.aliased.version(rows), end


def note_success(func: Any, args: Args) -> None:
    """Note what a call that has succeeded on every rank tells of the values of a batch."""
    if func is F.embedding and len(args) > 1:
        note_range(args[0], shape_of(args[1])[0])


def _is_known_to_fit(indices: Tensor, weight: Tensor) -> bool:
    if type(indices) is not BatchTensor or indices._range is None:
        return False
    rows, version, end = indices._range
    aliased = indices._meta.spec.view.aliased
    unwritten = not (aliased.of_memory(rows) or aliased.has_uncounted_writes) and version == aliased.version(rows)
    return unwritten and rows is indices._rows and end <= shape_of(weight)[0]


def _divisor(func: Any, args: Args, kwargs: Kwargs) -> Tensor | None:
    """Return the divisor, a tensor, of a division of integers; None if the call is another one."""
    divisor = args[0] if func in _DIVISOR_FIRST else argument(args, kwargs, 1, "other")
    if not isinstance(divisor, Tensor):
        return None
    if func.__name__.startswith("div") and kwargs.get("rounding_mode") is None:  # its result is no integer
        return None
    for operand in (*args[:2], divisor):
        kind = dtype_of(operand) if isinstance(operand, Tensor) else None
        if isinstance(operand, float) or (kind is not None and (kind.is_floating_point or kind.is_complex)):
            return None
    return divisor


def check_values(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Return True if all indices of a call of WRITES_ROWS are in range in this rank's rows, and no divisor is 0.

    Raises:
        IndexError: otherwise.
    """
    if func in _DIVIDED_IN_PLACE:
        divisor = _divisor(func, args, kwargs)
        if divisor is not None and not all(part.all() for part in rows_by_share(divisor)):
            raise IndexError
        return True
    if any(_is_outside(index, values) for index, values in _indices(func, args, kwargs)):
        raise IndexError
    return True


def _indices(func: Any, args: Args, kwargs: Kwargs) -> Iterator[tuple[Tensor, range]]:
    """Return the index tensors of a call of _BY_DIM or _BY_ITEMS, each with the range of its values."""
    shape = shape_of(argument(args, kwargs, 0, "input"))
    if func in _BY_DIM:
        dim, index = argument(args, kwargs, 1, "dim"), argument(args, kwargs, 2, "index")
        if isinstance(index, Tensor) and isinstance(dim, int) and -len(shape) <= dim < len(shape):
            yield index, range(shape[dim])
        return
    dim, items = 0, argument(args, kwargs, 1, "indices")
    for item in spelled_out(items if isinstance(items, (tuple, list)) else (items,), len(shape)) or ():
        if isinstance(item, Tensor) and dtype_of(item) != torch.bool:
            yield item, range(-shape[dim], shape[dim])
        dim += 0 if item is None else width_of(item)


def _is_index(value: Any) -> bool:
    return isinstance(value, Tensor) and not dtype_of(value).is_floating_point and dtype_of(value) != torch.bool


def _is_outside(index: Tensor, values: range) -> bool:
    ends = [end.item() for part in rows_by_share(index) if part.numel() for end in part.aminmax()]
    return not all(end in values for end in ends)
