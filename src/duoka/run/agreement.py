"""Exchange Python objects between ranks, so that all raise the same error if they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from duoka.collectives.base import Collectives
from duoka.errors import RanksApart
from duoka.network.keys import sign_object, verify_object
from duoka.supervision.status_board import name_ranks


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

    words: describes the difference between rank 0's value and another.

    Raises:
        RanksApart: the values differ; raised on every rank.
    """
    values = gather_objects(value, ranks)
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    if others:
        first = values[others[0]]
        same = [rank for rank in others if values[rank] == first]
        raise RanksApart(f"{name_ranks(same)} and rank 0 differ: {words(values[0], first)}")
