"""Every operation that torch's own tests know (`op_db`), with torch's own samples, for one device and for ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from duoka.view.rules.gradients import whole_gradients
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View
from tests.view.ranks import shared, whole_of

DTYPES = (torch.float64, torch.int64, torch.float32)
UNDEFINED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
# What is not said of the function itself, or written by it without saying so, into what is no batch in any script.
LEFT_OUT = {
    "nn.functional.batch_norm",  # running statistics that are rows
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "nn.functional.embedding",  # a table that is rows
    "nn.functional.embedding_bag",
}
# Whose second gradients for torch's samples have no right digit, or leave float16's range at W times their value.
STEEP = ("matrix_exp", "half")


@dataclass(frozen=True)
class Case:
    """One call. batches: which of the leaves are batches, along `dim`."""

    name: str
    function: Callable[..., Any]
    leaves: list[Any]
    tree: TreeSpec
    batches: frozenset[int]
    dim: int

    def __str__(self) -> str:
        shown = [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return f"{self.name} of {shown}, batches {sorted(self.batches)} along {self.dim}"

    @property
    def rows(self) -> int:
        """The size of the batches, all of which have the same."""
        return int(self.leaves[min(self.batches)].shape[self.dim])

    def run(self, view: View | None, gradients: bool = False) -> dict[str, list[Any]]:
        """What comes out, what the operands are afterwards, and first and second gradients."""
        torch.manual_seed(3)
        leaves = [leaf.detach().clone() if _is_dense(leaf) else leaf for leaf in self.leaves]
        if view is not None:
            leaves = [shared(view, leaf, self.dim) if i in self.batches else leaf for i, leaf in enumerate(leaves)]
        wanted = [leaf for leaf in leaves if gradients and isinstance(leaf, Tensor) and leaf.is_floating_point()]
        for leaf in wanted:
            leaf.requires_grad_()
        used = [leaf * 1 if any(leaf is one for one in wanted) else leaf for leaf in leaves]  # may be written into
        first, args, kwargs = tree_unflatten(used, self.tree)
        out = [leaf for leaf in tree_leaves(self.function(first, *args, **kwargs)) if not callable(leaf)]
        found = {"result": out, "operands": [leaf for leaf in used if isinstance(leaf, Tensor)]}
        if wanted:
            # torch's second gradient of a norm of zeros is NaN, that of duoka's sum of squares is 0.
            is_zero = any(leaf.numel() and not leaf.any() for leaf in wanted)
            second = self.name.partition(" ")[0] not in STEEP and not is_zero
            found.update(_gradients(out, wanted, view, second))
        return {name: [_value(entry) for entry in values] for name, values in found.items()}


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _value(entry: Any) -> Any:
    return whole_of(entry).detach().clone() if isinstance(entry, Tensor) else entry


def _gradients(out: list[Any], wanted: list[Tensor], view: View | None, second: bool) -> dict[str, list[Any]]:
    grad: Callable[..., Any] = torch.autograd.grad
    if view is not None and not any(isinstance(leaf, BatchTensor) for leaf in wanted):
        grad = partial(whole_gradients, view=view)  # by which a plain script's `torch.autograd.grad` is replaced
    of = [entry for entry in out if isinstance(entry, Tensor) and entry.is_floating_point() and entry.requires_grad]
    weighted = [(entry * torch.arange(1.0, entry.numel() + 1).view(entry.shape)).sin().sum() for entry in of]
    if not weighted:
        return {}
    first = grad(sum(weighted), wanted, allow_unused=True, create_graph=True)
    squares = [(part**2).sum() for part in first if part is not None and part.requires_grad]
    if not squares or not second:
        return {"gradients": list(first)}
    try:
        found = grad(sum(squares), wanted, allow_unused=True)
    except RuntimeError as error:
        if "not implemented" not in str(error) and "not differentiable twice" not in str(error):
            raise
        return {"gradients": list(first)}
    return {"gradients": list(first), "second gradients": list(found)}


def cases(operation: Any, samples: int, dims: tuple[int, ...]) -> Iterator[Case]:
    """Calls of an operation as a function, a method and in place, with one operand or all of a size as batches."""
    dtype = next((dtype for dtype in DTYPES if dtype in operation.dtypes), None)
    if dtype is None or operation.name in LEFT_OUT:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What `operation.sample_inputs` calls, without noting for each sample which test asks, from the stack.
        given = list(islice(operation.sample_inputs_func(operation, "cpu", dtype, False), 8 * samples))
    variants = {
        "": operation.op,
        " (method)": operation.method_variant,
        " (in place)": operation.inplace_variant,
        " (operator)": operation.operator_variant,
        " (operator in place)": operation.inplace_operator_variant,
    }
    fit = [sample for sample in given if any(_is_dense(leaf) and leaf.dim() for leaf in tree_leaves(sample.input))]
    for sample in fit[:: max(1, len(fit) // samples)][:samples]:
        leaves, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        for dim in dims:
            for batches in _batches(leaves, dim):
                for variant, function in variants.items():
                    if function is not None:
                        yield Case(operation.name + variant, function, leaves, tree, batches, dim)


def _batches(leaves: list[Any], dim: int) -> set[frozenset[int]]:
    """The first operand that can be a batch, alone, and with all others of its size."""
    sizes = {i: leaf.shape[dim] for i, leaf in enumerate(leaves) if _is_dense(leaf) and leaf.dim() > dim}
    first = next((i for i, size in sizes.items() if size >= 2), None)
    if first is None:
        return set()
    return {frozenset({first}), frozenset(i for i, size in sizes.items() if size == sizes[first])}


def _close(name: str) -> dict[str, float]:
    """How close gradients are: 16 bits have seldom room for a third of a number."""
    return dict.fromkeys(("rtol", "atol"), 2e-2 if name.startswith("bfloat16") else 1e-5)


def difference(expected: dict[str, list[Any]], found: dict[str, list[Any]], name: str) -> str | None:
    """What is not as on one device."""
    if expected.keys() != found.keys():
        return f"{sorted(found)} instead of {sorted(expected)}"
    for what, values in expected.items():
        if what == "result" and name.partition(" ")[0] in UNDEFINED:
            continue
        for one, other in zip(values, found[what], strict=True):
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                try:
                    close = _close(name) if "gradients" in what else {}  # sums in another order
                    torch.testing.assert_close(other, one, equal_nan=True, check_stride=what == "result", **close)
                except AssertionError as error:
                    return f"{what}: {error}"
            elif isinstance(one, Tensor) or isinstance(other, Tensor):
                given = one if isinstance(one, Tensor) else other
                if what in ("result", "operands") or given.any():  # no gradient is a gradient of nothing
                    return f"{what}: {other} instead of {one}"
            elif one != other and not (one != one and other != other):
                return f"{what}: {other} instead of {one}"
    return None
