"""What the families of rules share: finding torch's functions by name, and arguments of one shape of batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.tensor.batch import BatchTensor, Spec

Function = Callable[..., Any]


def functions(names: str, spaces: Iterable[Any] = (Tensor, torch, F, torch.special)) -> list[Function]:
    """Every function of these (space-separated) names in torch, its functional module and Tensor."""
    found = [(space, name) for space in spaces for name in names.split() if hasattr(space, name)]
    own = [getattr(space, name) for space, name in found if space is Tensor or not name.startswith("__")]
    return [function for function in own if callable(function) and not isinstance(function, torch.dtype)]


def getters(names: str) -> list[Function]:
    """The getters of these attributes of Tensor, as `__torch_function__` is handed them."""
    attributes: list[Any] = [getattr(Tensor, name, None) for name in names.split()]
    return [attribute.__get__ for attribute in attributes if attribute is not None]


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    """One argument of a call, given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> list[int]:
    """A shape given as separate numbers, as one sequence, or by name."""
    given = (
        args[1:]
        if len(args) > 2 or (len(args) == 2 and isinstance(args[1], int))
        else argument(args, kwargs, 1, name)
    )
    return [int(size) for size in given]


def ndim_of(tensor: Tensor) -> int:
    """How many dimensions it has: asked of a batch's rows, which costs no rule."""
    return tensor._rows.dim() if isinstance(tensor, BatchTensor) else tensor.dim()


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Its type, in the same way."""
    return tensor._rows.dtype if isinstance(tensor, BatchTensor) else tensor.dtype


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Its sizes, the whole batch's: made from a batch's rows, which costs no rule."""
    if not isinstance(tensor, BatchTensor):
        return tuple(tensor.shape)
    shape, dim = tuple(tensor._rows.shape), tensor._spec.dim
    return *shape[:dim], tensor._spec.size, *shape[dim + 1 :]


def align(values: Iterable[Any]) -> tuple[Spec, int] | None:
    """The common spec of the batch tensors among `values`, and the batch dimension counted from the right.

    None where they do not hold the same rows in the same (broadcast) dimension.
    """
    spec: Spec | None = None
    right = 0
    for value in values:
        if not isinstance(value, BatchTensor):
            continue
        mine, place = value._spec, value._rows.dim() - value._spec.dim
        if spec is None:
            spec, right = mine, place
        elif place != right or not same_rows(mine, spec):
            return None
    return None if spec is None else (spec, right)


def same_rows(one: Spec, other: Spec) -> bool:
    """Whether two batches hold the same rows in the same order, in whatever dimension."""
    return one.partition is other.partition and one.outer == other.outer and one.inner == other.inner


def localise(value: Any, spec: Spec, right: int) -> Any:
    """An operand that broadcasts with rows: a batch's own, a plain tensor's cut where it has the batch's size.

    Raises LookupError for a tensor that does not broadcast with the batch, and for other rows.
    """
    if isinstance(value, BatchTensor):
        if value._rows.dim() - value._spec.dim != right or not same_rows(value._spec, spec):
            raise LookupError
        return value._local
    if not isinstance(value, Tensor):
        return value
    dim = value.dim() - right
    if dim < 0 or value.shape[dim] == 1:
        return spec.view.replicate(value)
    if value.shape[dim] != spec.size:
        raise LookupError
    return spec.local_rows(value, dim)


def rows_in(value: Tensor, spec: Spec, dim: int) -> Tensor:
    """This rank's rows of an operand that has the batch in `dim`; other rows, or rows elsewhere, come whole first.

    Raises LookupError for a tensor that has not the batch's size there.
    """
    if isinstance(value, BatchTensor) and value._spec.dim == dim and same_rows(value._spec, spec):
        return value._local
    shape = shape_of(value)
    if len(shape) <= dim or shape[dim] != spec.size:
        raise LookupError
    return spec.local_rows(value.full_tensor() if isinstance(value, BatchTensor) else value, dim)


def wrap(out: Any, spec: Spec) -> Any:
    """Tensors, alone or in a (named) tuple or list, as batches of this spec."""
    if isinstance(out, Tensor):
        return BatchTensor(out, spec)
    parts = [wrap(part, spec) for part in out]
    kind = type(out)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
