"""A module call, taken apart: its inputs, where the batch is in them, and a rank's rows of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from duoka.private.torch import TreeSpec, tree_flatten, tree_unflatten
from duoka.view.batch import BatchTensor, Spec, of_share
from duoka.view.cut import Cut
from duoka.view.view import View
from duoka.view.witness import Mixed


@dataclass(frozen=True, slots=True)
class Call:
    """A module call with its inputs flattened.

    batch: the first batch tensor among them. leads: where else the batch could be, if it was cut by hand.
    """

    original: Callable[..., Any]
    module: nn.Module
    leaves: list[Any]
    tree: TreeSpec
    batch: BatchTensor | None
    leads: tuple[tuple[int, int], ...] = ()

    def run(self, leaves: list[Any]) -> Any:
        """Call the module with other leaves in the same places."""
        args, kwargs = tree_unflatten(leaves, self.tree)
        return self.original(self.module, *args, **kwargs)

    def try_out(self, leaves: list[Any]) -> Any:
        """The same, to find out whether rows are independent. Raises Mixed where it changes what it was given."""
        versions = [_version(leaf) for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        out = self.original(self.module, *args, **kwargs)
        left, tree = tree_flatten((args, kwargs))
        if tree != self.tree or any(one is not other for one, other in zip(left, leaves, strict=True)):
            raise Writing("it changes a container among its inputs")
        for leaf, version, was in zip(leaves, versions, self.leaves, strict=True):
            if _version(leaf) != version and not isinstance(was, BatchTensor):
                raise Writing("it writes into an input")  # into a part of what every rank holds whole
        return out

    def of_share(self, place: int) -> Call:
        """The same call with the own share at `place` of each batch."""
        if self.batch is None or len(self.batch._shares) == 1:
            return self
        return replace(self, leaves=of_share(self.leaves, place), batch=self.batch._shares[place])

    def elsewhere(self, module: nn.Module, device: torch.device) -> Call:
        """The same call of another module, with its tensors on another device."""

        def moved(leaf: Any) -> Any:
            if isinstance(leaf, BatchTensor):
                return BatchTensor(leaf._local.to(device), leaf._spec)
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        leaves = list(map(moved, self.leaves))
        batch = next((leaf for leaf in leaves if isinstance(leaf, BatchTensor)), None)
        return replace(self, module=module, leaves=leaves, batch=batch)

    def cut(self, view: View, lead: tuple[int, int] | None) -> Cut | None:
        """How the batch of this call is cut; None where it is too small to be shared out."""
        if self.batch is not None:
            return self.batch._spec.cut
        assert lead is not None
        n = self.leaves[lead[0]].shape[lead[1]]
        return view.cut(n) if view.shares(n) else None

    def kind(self) -> Any:
        """What calls have in common that are cut alike."""
        n = self.batch._spec.cut.n if self.batch is not None else -1
        switches = self.module.training, torch.is_grad_enabled()
        return switches, self.tree, tuple(_kind(leaf, n) for leaf in self.leaves)

    def rows(
        self, view: View, cut: Cut, inputs: tuple[int | None, ...], part: tuple[int, int] | None = None
    ) -> list[Any]:
        """The leaves with this rank's rows in them, or with some of its rows: `part` = (first, past the last)."""
        return [_own(view, leaf, dim, cut, part) for leaf, dim in zip(self.leaves, inputs, strict=True)]

    def batches(self, view: View, lead: tuple[int, int] | None, inputs: tuple[int | None, ...]) -> list[Any] | None:
        """The leaves with batch tensors in place of what was cut by hand; None where there is no such."""
        cut = None if lead is None else self.cut(view, lead)
        if cut is None:
            return None

        def batch(leaf: Any, dim: int | None) -> Any:
            if dim is None or leaf.shape[dim] != cut.n:
                return leaf
            return BatchTensor.of(leaf, view, dim)

        return list(map(batch, self.leaves, inputs))

    def is_batch_first(self) -> bool:
        """Whether it is plain where the batch is in what was cut by hand; else let the children find out."""
        return len(self.leads) == 1 or bool(self.leads and self.leaves[self.leads[0][0]].dim() == 2)


class Writing(Mixed):
    """Rows are written into, or kept by, what the call was given."""


def leads_in(view: View, leaves: list[Any], n: int | None) -> tuple[tuple[int, int], ...]:
    """Where plain inputs could be a batch that was cut by hand: the input, and its dimensions, batch-first or not.

    n: the size of the batch that is known to be around.
    """
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter) or not leaf.dim():
            continue
        if n is not None and leaf.shape[0] == n:
            return ((index, 0),)
        if n is None and view.shares(leaf.shape[0]):  # a smaller one, with a long second dimension, is a small batch
            return tuple((index, dim) for dim, size in enumerate(leaf.shape[:2]) if view.shares(size))
    return ()


def _own(view: View, leaf: Any, dim: int | None, cut: Cut, part: tuple[int, int] | None) -> Any:
    """This rank's rows of an input, or the `part` of them."""
    if isinstance(leaf, BatchTensor):
        if leaf._spec.cut is not cut:
            return leaf.full_tensor()
        rows, spec = leaf._local, leaf._spec
    elif dim is not None and leaf.shape[dim] == cut.n:
        spec = Spec(view, cut, dim)
        rows = spec.own(leaf)
    else:
        return view.enter(leaf) if isinstance(leaf, Tensor) else leaf
    if part is None:
        return rows
    start, stop = part
    apart = rows.unflatten(spec.dim, (spec.outer, cut.rows, spec.inner)).narrow(spec.dim + 1, start, stop - start)
    return apart.flatten(spec.dim, spec.dim + 2)


def own_part(leaf: Any) -> Any:
    """This rank's rows of a batch tensor; anything else as it is."""
    return leaf._local if isinstance(leaf, BatchTensor) else leaf


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def _kind(leaf: Any, n: int) -> Any:
    """What of an input decides how a call is cut; n: the batch's size."""
    if isinstance(leaf, BatchTensor):
        return BatchTensor, leaf.dim(), leaf.dtype, leaf._spec.dim, leaf._spec.outer > 1
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.layout, leaf.dtype, tuple(size == n for size in leaf.shape)
    if isinstance(leaf, (bool, str, Enum)) or leaf is None:  # a switch: the forward pass may go another way
        return leaf
    return type(leaf)


def dimension_of(leaf: Any, n: int) -> int | None:
    """Where a plain tensor has n entries."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, (BatchTensor, nn.Parameter)):
        return None
    return next((dim for dim, size in enumerate(leaf.shape) if size == n), None)
