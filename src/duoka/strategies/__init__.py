"""The strategies by name. Adding one is a file and a line here (and in `duoka.plan`, which does not import torch)."""

from __future__ import annotations

from duoka.strategies.base import Strategy
from duoka.strategies.compress import compression
from duoka.strategies.ddp import Ddp
from duoka.strategies.dp import Dp
from duoka.strategies.single import Single
from duoka.view.collectives import Collectives
from duoka.view.draws import random_digest

__all__ = ["Ddp", "Dp", "Single", "Strategy", "create"]


def create(name: str, ranks: Collectives, compress: str = "none") -> Strategy:
    """The strategy `name` for this rank. compress: what goes between ranks for their gradients (compress.py)."""

    def ddp() -> Strategy:
        return Ddp(ranks, stream=lambda: random_digest() & 0xFFFF, compression=compression(compress))

    return {"single": Single, "ddp": ddp, "dp": Dp}[name]()
