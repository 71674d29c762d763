"""Helpers of the rules: find torch's functions by name, align and localise arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.private.torch import tree_map_only
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule
from duoka.view.tensor.spec import Spec


def functions(names: str, spaces: Iterable[Any] = (Tensor, torch, F, torch.special)) -> list[Function]:
    """Return all functions with these space-separated names in `spaces`; skip names that do not exist there.

    Special methods (`__add__`) are taken from Tensor only.
    """
    named = [(space, name) for space in spaces for name in names.split() if hasattr(space, name)]
    values = [getattr(space, name) for space, name in named if space is Tensor or not name.startswith("__")]
    return [function for function in values if callable(function) and not isinstance(function, torch.dtype)]


def getters(names: str) -> list[Function]:
    """Return the getters of these attributes of Tensor, as `__torch_function__` gets them."""
    attributes: list[Any] = [getattr(Tensor, name, None) for name in names.split()]
    return [attribute.__get__ for attribute in attributes if attribute is not None]


def argument(args: Args, kwargs: Kwargs, index: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, given by position or by name."""
    return args[index] if len(args) > index else kwargs.get(name, default)


def from_left(dims: Iterable[Any], ndim: int) -> list[int]:
    """Return dimensions counted from the left; raise NotByRows for those of which torch raises an error."""
    if not all(isinstance(dim, int) and -ndim <= dim < ndim for dim in dims):
        raise NotByRows
    return [dim % ndim for dim in dims]


def sizes_of(args: Args, kwargs: Kwargs, name: str) -> list[int]:
    """Return a shape that is given as separate numbers, as one sequence, or by name."""
    sizes = (
        args[1:]
        if len(args) > 2 or (len(args) == 2 and isinstance(args[1], int))
        else argument(args, kwargs, 1, name)
    )
    return [int(size) for size in sizes]


def ndim_of(tensor: Tensor) -> int:
    """Return the number of dimensions, without a dispatch."""
    return len(tensor._meta.local_shape) if isinstance(tensor, BatchTensor) else tensor.dim()


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the dtype, without a dispatch."""
    return tensor._meta.dtype if isinstance(tensor, BatchTensor) else tensor.dtype


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the global shape, without a dispatch."""
    if not isinstance(tensor, BatchTensor):
        return tuple(tensor.shape)
    shape, dim = tuple(tensor._meta.local_shape), tensor._spec.dim
    return *shape[:dim], tensor._spec.size, *shape[dim + 1 :]


class NotByRows(Exception):
    """Operands do not hold the same rows. Raised in a rule, it has the call computed whole, like NotImplemented."""


def align(values: Iterable[Any]) -> tuple[Spec, int]:
    """Return the common placement of the batches among `values`, and the batch dimension counted from the right.

    Raises NotByRows where they do not hold the same rows in the same (broadcast) dimension.
    """
    spec: Spec | None = None
    right = 0
    for value in values:
        if not isinstance(value, BatchTensor):
            continue
        mine, from_right = value._spec, value._rows.dim() - value._spec.dim
        if spec is None:
            spec, right = mine, from_right
        elif from_right != right or not same_rows(mine, spec):
            raise NotByRows
    if spec is None:
        raise NotByRows
    return spec, right


def same_rows(spec: Spec, other: Spec) -> bool:
    """Return True if two batches hold the same rows in the same order, in any dimension."""
    return spec.partition is other.partition and spec.outer == other.outer and spec.inner == other.inner


def localise(value: Any, spec: Spec, right: int) -> Any:
    """Return the local rows of an operand that broadcasts with rows; a plain tensor of the batch's size is split.

    Raises NotByRows for a tensor that does not broadcast with the batch, and for other rows.
    """
    if isinstance(value, BatchTensor):
        if value._rows.dim() - value._spec.dim != right or not same_rows(value._spec, spec):
            raise NotByRows
        return value._local
    if not isinstance(value, Tensor):
        return value
    dim = value.dim() - right
    if dim < 0 or value.shape[dim] == 1:
        return spec.view.replicate(value)
    if value.shape[dim] != spec.size:
        raise NotByRows
    return spec.local_rows(value, dim)


def rows_in(value: Tensor, spec: Spec, dim: int) -> Tensor:
    """Return this rank's rows of an operand with the batch in `dim`; a batch with another placement is gathered.

    Raises NotByRows for a tensor that has not the batch's size there.
    """
    if isinstance(value, BatchTensor) and value._spec.dim == dim and same_rows(value._spec, spec):
        return value._local
    shape = shape_of(value)
    if len(shape) <= dim or shape[dim] != spec.size:
        raise NotByRows
    return spec.local_rows(value.full_tensor() if isinstance(value, BatchTensor) else value, dim)


def wrap(out: Any, spec: Spec) -> Any:
    """Make batches of tensors, alone or in a (named) tuple or list."""
    return tree_map_only(Tensor, lambda rows: BatchTensor(rows, spec), out)


def in_place(rule: Rule) -> Rule:
    """Make the rule of a function that writes to its first argument, a batch, of that of one that makes a new one."""

    def writing(func: Function, args: Args, kwargs: Kwargs) -> Any:
        if not args or not isinstance(args[0], BatchTensor):
            return NotImplemented
        return NotImplemented if rule(func, args, kwargs) is NotImplemented else args[0]

    return writing
