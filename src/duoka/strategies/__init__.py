"""The strategies by name. Adding one is a file and a line here (and in `duoka.plan`, which does not import torch)."""

from __future__ import annotations

from duoka.strategies.base import Strategy
from duoka.strategies.ddp import Ddp
from duoka.strategies.single import Single
from duoka.view.collectives import Collectives
from duoka.view.draws import random_digest

__all__ = ["Ddp", "Single", "Strategy", "create"]


def create(name: str, ranks: Collectives) -> Strategy:
    """The strategy `name` for this rank."""
    return {"single": lambda: Single(), "ddp": lambda: Ddp(ranks, stream=lambda: random_digest() & 0xFFFF)}[name]()
