"""What ranks tell each other of themselves, so that an error is the same on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from duoka.errors import RanksApart
from duoka.network.signing import sign_object, verify_object
from duoka.supervision.status_board import name_ranks
from duoka.view.collectives import Collectives


def gather_objects(value: Any, ranks: Collectives) -> list[Any]:
    """Every rank's `value`, which pickle must know, in the order of ranks."""
    data = torch.frombuffer(bytearray(sign_object(value, ranks.key)), dtype=torch.uint8)
    sizes = ranks.all_gather(torch.tensor([data.numel()])).view(-1).tolist()
    room = torch.zeros(max(sizes), dtype=torch.uint8)
    room[: data.numel()] = data
    found = ranks.all_gather(room)
    return [verify_object(one[:size].numpy().tobytes(), ranks.key) for one, size in zip(found, sizes, strict=True)]


def check_same(value: Any, ranks: Collectives, words: Callable[[Any, Any], str]) -> None:
    """See that all ranks have an equal `value`.

    words: says, of rank 0's value and of another, what is different.

    Raises:
        RanksApart: they have not; on every rank.
    """
    values = gather_objects(value, ranks)
    others = [rank for rank, one in enumerate(values) if one != values[0]]
    if others:
        first = values[others[0]]
        same = [rank for rank in others if values[rank] == first]
        raise RanksApart(f"{name_ranks(same)} and rank 0 differ: {words(values[0], first)}")
