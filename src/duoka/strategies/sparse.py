"""Sparse gradients (`nn.Embedding(sparse=True)`): each rank computes the entries of its rows; all receive all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from duoka.collectives.base import Collectives
from duoka.errors import Refused

_DENSE = -1  # in place of a number of entries


def average_sparse(parameters: Sequence[Tensor | None], ranks: Collectives) -> None:
    """Average the sparse gradients of these parameters over ranks. Every rank calls it.

    A parameter that has no gradient, or was deleted (None), has no entries.

    Raises:
        Refused: the gradient of one is sparse on some ranks and dense on others.
    """
    held = [None if parameter is None or parameter.grad is None else parameter.grad for parameter in parameters]
    grads = [grad.coalesce() if grad is not None and grad.is_sparse else grad for grad in held]
    numbers = torch.tensor([_number(grad) for grad in grads], dtype=torch.long, device="cpu")
    for parameter, grad, counts in zip(parameters, grads, ranks.all_gather(numbers).unbind(1), strict=True):
        entries = counts.tolist()
        if max(entries) > 0 and min(entries) == _DENSE:
            raise Refused("a gradient is sparse on some ranks and dense on others; use nn.Embedding(sparse=False)")
        if max(entries) <= 0 or parameter is None:
            continue
        with torch.no_grad():
            parameter.grad = _mean(parameter, grad, entries, ranks)


def _number(grad: Tensor | None) -> int:
    return 0 if grad is None else len(grad.values()) if grad.is_sparse else _DENSE


def _mean(parameter: Tensor, grad: Tensor | None, entries: list[int], ranks: Collectives) -> Tensor:
    """Return the mean of all ranks' gradients; entries: their numbers of entries along dimension 0."""
    rows = parameter.new_zeros((max(entries), *parameter.shape[1:]))
    places = torch.zeros(max(entries), dtype=torch.long, device=parameter.device)
    if grad is not None:
        count = len(grad.values())
        places[:count], rows[:count] = grad.indices()[0], grad.values()
    all_places, all_rows = ranks.all_gather(places), ranks.all_gather(rows)
    chosen = torch.cat([all_places[rank, :number] for rank, number in enumerate(entries)])
    values = torch.cat([all_rows[rank, :number] for rank, number in enumerate(entries)])
    total = torch.sparse_coo_tensor(
        chosen[None], values / ranks.world_size, parameter.shape, check_invariants=False, is_coalesced=False
    )
    return total.coalesce()
