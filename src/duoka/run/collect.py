"""Sums, means and rows of all ranks, of values that are each rank's own."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from duoka.errors import OptionError
from duoka.run.agreement import check_same
from duoka.view.batch import BatchTensor
from duoka.view.collectives import Collectives


def all_sum(value: Any, ranks: Collectives) -> Any:
    """The sum over ranks, of the type that `value` has."""

    def total(tensor: Tensor) -> Tensor:
        return ranks.all_reduce(tensor.long() if tensor.dtype == torch.bool else tensor.clone())

    return _each(value, ranks, "all_sum", total, keeps_numbers=True)


def all_mean(value: Any, ranks: Collectives) -> Any:
    """The mean over ranks."""

    def mean(tensor: Tensor) -> Tensor:
        dense = tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
        return ranks.all_reduce(dense.clone()) / ranks.world_size

    return _each(value, ranks, "all_mean", mean, keeps_numbers=True)


def all_gather(value: Any, ranks: Collectives) -> Any:
    """All ranks' rows, in the order of ranks."""

    def gather(tensor: Tensor) -> Tensor:
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        sizes = ranks.all_gather(torch.tensor([rows.shape[0]])).view(-1).tolist()
        room = rows.new_zeros((max(sizes), *rows.shape[1:]))
        room[: rows.shape[0]] = rows
        sent = room.view(torch.uint8) if room.dtype == torch.bool else room
        found = ranks.all_gather(sent)
        whole = torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])
        return whole.view(torch.bool) if room.dtype == torch.bool else whole

    return _each(value, ranks, "all_gather", gather, keeps_numbers=False)


def _each(
    value: Any, ranks: Collectives, name: str, collective: Callable[[Tensor], Tensor], keeps_numbers: bool
) -> Any:
    """Apply a collective to every leaf, when all ranks have said that theirs are alike."""
    leaves, tree = tree_flatten(value)
    refusal = next((text for text in (_refusal(leaf) for leaf in leaves) if text), "")
    rows_may_differ = name == "all_gather"
    seen = refusal or (str(tree), [_seen(leaf, rows_may_differ) for leaf in leaves])
    check_same(seen, ranks, lambda first, other: f"run.{name} was given {first} by rank 0, but {other}")
    if refusal:
        raise OptionError(f"run.{name}", refusal, "given tensors, numbers, or dicts and lists of them")
    found = []
    for leaf in leaves:
        is_tensor = isinstance(leaf, Tensor)
        with torch.no_grad():
            out = collective(leaf.detach() if is_tensor else _as_tensor(leaf))
        found.append(out if is_tensor or not keeps_numbers else out.item())
    return tree_unflatten(found, tree)


def _as_tensor(number: Any) -> Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _refusal(leaf: Any) -> str:
    """Why a leaf cannot be given; empty if it can."""
    if isinstance(leaf, BatchTensor):
        return "a batch tensor, of which every number (x.sum(), x.mean()) is the whole batch's already"
    return "" if isinstance(leaf, (Tensor, Number)) else type(leaf).__name__


def _seen(leaf: Any, rows_may_differ: bool) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    shape = [str(size) for size in leaf.shape]
    if rows_may_differ and shape:
        shape[0] = "rows"
    return f"{str(leaf.dtype)[6:]} ({', '.join(shape)})"
