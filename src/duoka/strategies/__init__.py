"""The strategies by name. Adding one is a file and a line here (and in `duoka.plan`, which does not import torch)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from duoka.strategies.base import Strategy
from duoka.strategies.ddp import Ddp
from duoka.strategies.exact import Exact
from duoka.strategies.single import Single
from duoka.view.collectives import Collectives
from duoka.view.draws import random_digest

__all__ = ["Ddp", "Exact", "Single", "Strategy", "create"]


def create(name: str, ranks: Collectives, sent_as: torch.dtype = torch.float32, shares: int = 0) -> Strategy:
    """The strategy `name` for this rank.

    sent_as: the type in which gradients go between ranks. shares: of each batch, with `exact`.
    """

    def stream() -> int:
        return random_digest() & 0xFFFF

    makers: dict[str, Callable[[], Strategy]] = {
        "single": Single,
        "ddp": lambda: Ddp(ranks, stream=stream, sent_as=sent_as),
        "exact": lambda: Exact(ranks, shares, stream=stream),
    }
    return makers[name]()
