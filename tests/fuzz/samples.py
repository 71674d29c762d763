"""A call of one of torch's operations with torch's own samples (`op_db`), and all that a script sees of it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten
from torch.utils.data import DataLoader

from tests.view.rules.operations import UNDEFINED, Case, cases

SAMPLES = 4  # of each operation
LARGE = 20_000  # elements of operands of which a call is slow


@cache
def operations() -> dict[str, Any]:
    """Return torch's operations by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {f"{operation.name} {operation.variant_test_name}".strip(): operation for operation in op_db}


@cache
def cases_of(name: str) -> list[Case]:
    """Return the calls of an operation: each is the same in every process."""
    with seeded():
        drawn = cases(operations()[name], SAMPLES, (0, 1))
        return [case for case in drawn if sum(leaf.numel() for leaf in case.leaves if is_dense(leaf)) < LARGE]


@contextmanager
def seeded() -> Iterator[None]:
    """Let torch's functions that make samples draw the same numbers in every process."""
    torch.manual_seed(0)
    np.random.seed(0)
    state = random.getstate()  # hypothesis draws programs by it
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)


class Call:
    """One call.

    units: ones, by which numbers are multiplied: moved a little, they show what rounding does to the result.
    operands: the tensors that the function is given. batches: those of them that a loader has yielded.
    leaves: what gradients are taken of. results: the tensors that the function returns.
    """

    def __init__(self, name: str, number: int, units: Tensor, needs_gradient: bool) -> None:
        case = cases_of(name)[number]
        self.is_defined = name.split(" ")[0] not in UNDEFINED
        torch.manual_seed(3)
        values = [moved(leaf, units) for leaf in case.leaves]
        given = [as_batch(value, case.dim) if place in case.batches else value for place, value in enumerate(values)]
        batches = [given[place] for place in sorted(case.batches)]
        self.leaves = [batch.requires_grad_() for batch in batches if needs_gradient and batch.is_floating_point()]
        used = [value * 1 if any(value is leaf for leaf in self.leaves) else value for value in given]
        self.operands = [value for value in used if is_dense(value)]
        self.batches = [used[place] for place in sorted(case.batches)]
        first, args, kwargs = tree_unflatten(used, case.tree)
        self.returned = case.function(first, *args, **kwargs)
        self.results = [leaf for leaf in tree_leaves(self.returned) if is_dense(leaf)]

    def flags(self) -> Any:
        """Return what the results are, whose memory they have, and how many writes torch has counted."""
        kinds = [type(self.returned).__name__, len(self.results)]
        for result in self.results:
            steps = [step for step, size in zip(result.stride(), result.shape, strict=True) if size > 1]
            kinds += [
                str(result.dtype),
                tuple(result.shape),
                steps if result.numel() else (),
                result.storage_offset(),
            ]
            kinds += [result.requires_grad, result.is_leaf, result.is_conj(), result.is_neg()]
            for other in self.operands + self.results:
                kinds += [result is other, _starts_alike(result, other)]
        return kinds, [tensor._version for tensor in self.operands + self.results]

    def values(self) -> Any:
        """Return the numbers of all tensors."""
        return [numbers(tensor) for tensor in self.operands + self.results] if self.is_defined else []

    def gradients(self) -> Any:
        """Return the gradients of a sum of the results."""
        terms = [result.sum() for result in self.results if result.requires_grad and result.is_floating_point()]
        if not self.leaves or not terms or not self.is_defined:
            return []
        torch.manual_seed(4)
        found = torch.autograd.grad(sum(terms), self.leaves, allow_unused=True)
        return [None if gradient is None else numbers(gradient) for gradient in found]


def is_dense(value: Any) -> bool:
    """Return whether a value is a tensor with strides."""
    return isinstance(value, Tensor) and value.layout is torch.strided


def moved(leaf: Any, units: Tensor) -> Any:
    """Return a copy of an operand, times the units."""
    if not is_dense(leaf):
        return leaf
    copy = leaf.detach().clone()
    if copy.is_floating_point() and copy.numel() <= len(units):
        copy.mul_(units[: copy.numel()].view(copy.shape))
    return copy


def as_batch(value: Tensor, dim: int) -> Tensor:
    """Return the tensor as the only batch of a loader."""
    rows = value.transpose(0, dim)
    return next(iter(DataLoader(rows, batch_size=len(rows)))).transpose(0, dim)  # type: ignore[no-any-return]


def _starts_alike(one: Tensor, other: Tensor) -> bool | None:
    return one.data_ptr() == other.data_ptr() if one.numel() and other.numel() else None


def numbers(tensor: Tensor) -> Any:
    """Return the values of a tensor, without NaN."""
    values = tensor.detach()
    return values.double().nan_to_num(7, 8, 9) if values.is_floating_point() else values
