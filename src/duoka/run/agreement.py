"""Values of all ranks: Python objects, checks that they are equal, and reductions of those that differ."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from duoka.collectives.base import Collectives
from duoka.errors import OptionError, RanksApart
from duoka.network.keys import sign_object, verify_object
from duoka.private.torch import tree_flatten, tree_unflatten
from duoka.supervision.status_board import name_ranks
from duoka.system.user_code import user_line
from duoka.view.tensor.batch import BatchTensor


def gather_objects(value: Any, ranks: Collectives) -> list[Any]:
    """Return every rank's `value`, which must be picklable, in the order of ranks."""
    data = torch.frombuffer(bytearray(sign_object(value, ranks.key)), dtype=torch.uint8)
    sizes = ranks.all_gather(torch.tensor([data.numel()], device="cpu")).view(-1).tolist()
    room = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    room[: data.numel()] = data
    gathered = ranks.all_gather(room)
    return [verify_object(row[:size].numpy().tobytes(), ranks.key) for row, size in zip(gathered, sizes, strict=True)]


def check_same(value: Any, ranks: Collectives, words: Callable[[Any, Any], str]) -> None:
    """Check that all ranks have an equal `value`.

    words: describes the difference between rank 0's value and another. Raises RanksApart if the values differ; raised
    on every rank.
    """
    values = gather_objects(value, ranks)
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    if others:
        first = values[others[0]]
        same = [rank for rank in others if values[rank] == first]
        raise RanksApart(f"{name_ranks(same)} and rank 0 differ: {words(values[0], first)}")


class LocalReductions:
    """The reductions of one run, for values that differ between ranks.

    Before the first reduction of each line and type of value, the ranks check that their values have the same
    structure.
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._agreed: set[Any] = set()

    def reduce(self, name: str, value: Any) -> Any:
        """Apply a reduction to every leaf of a value.

        name: "all_sum", of the type of `value`; "all_mean"; or "all_gather", all ranks' rows in the order of ranks.
        """
        leaves, tree = tree_flatten(value)
        self._agree(leaves, tree, name)
        collective = {"all_sum": self._total, "all_mean": self._mean, "all_gather": self._rows}[name]
        values = []
        for leaf in leaves:
            is_tensor = isinstance(leaf, Tensor)
            with torch.no_grad():
                out = collective(leaf.detach() if is_tensor else _as_tensor(leaf))
            values.append(out if is_tensor or name == "all_gather" else out.item())
        return tree_unflatten(values, tree)

    def _total(self, tensor: Tensor) -> Tensor:
        return self._ranks.all_reduce(tensor.long() if tensor.dtype == torch.bool else tensor.clone())

    def _mean(self, tensor: Tensor) -> Tensor:
        dense = tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()
        return self._total(dense) / self._ranks.world_size

    def _rows(self, tensor: Tensor) -> Tensor:
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        sizes = self._ranks.all_gather(torch.tensor([rows.shape[0]])).view(-1).tolist()
        room = rows.new_zeros((max(sizes), *rows.shape[1:]))
        room[: rows.shape[0]] = rows
        gathered = self._ranks.all_gather(room.view(torch.uint8) if room.dtype == torch.bool else room)
        values = torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])
        return values.view(torch.bool) if room.dtype == torch.bool else values

    def _agree(self, leaves: list[Any], tree: Any, name: str) -> None:
        """Check that all ranks' leaves have the same types and shapes, and can be reduced."""
        seen = (name, user_line(), str(tree), tuple(_seen(leaf, name == "all_gather") for leaf in leaves))
        if seen in self._agreed:
            return
        refusal = next((text for text in map(_refusal, leaves) if text), "")
        request = refusal or (seen[2], list(seen[3]))
        check_same(request, self._ranks, lambda first, other: f"run.{name} was given {first} by rank 0, but {other}")
        if refusal:
            raise OptionError(f"run.{name}", refusal, "given tensors, numbers, or dicts and lists of them")
        self._agreed.add(seen)


def _as_tensor(number: Any) -> Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _refusal(leaf: Any) -> str:
    """Return why a leaf cannot be reduced; empty if it can."""
    if isinstance(leaf, BatchTensor):
        return "a batch tensor, of which every number (x.sum(), x.mean()) is the whole batch's already"
    return "" if isinstance(leaf, (Tensor, Number)) else type(leaf).__name__


def _seen(leaf: Any, rows_may_differ: bool) -> str:
    if not isinstance(leaf, Tensor) or isinstance(leaf, BatchTensor):
        return type(leaf).__name__
    shape = [str(size) for size in leaf.shape]
    if rows_may_differ and shape:
        shape[0] = "rows"
    return f"{str(leaf.dtype)[6:]} ({', '.join(shape)})"
