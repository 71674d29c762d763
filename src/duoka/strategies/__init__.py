"""The strategies by name. A new one is a file and a line here (and in `planning/plan.py`, without torch)."""

from __future__ import annotations

from collections.abc import Callable

from duoka.collectives.base import Collectives
from duoka.planning.options import RunSettings
from duoka.planning.plan import weighted_sizes
from duoka.strategies.base import Strategy
from duoka.strategies.compress import compression
from duoka.strategies.ddp import Ddp
from duoka.strategies.exact import Exact
from duoka.strategies.fsdp import Fsdp
from duoka.view.generators import random_digest

__all__ = ["Ddp", "Exact", "Fsdp", "Strategy", "create"]


def create(settings: RunSettings, ranks: Collectives, every: bool = True) -> Strategy:
    """Create the strategy of the settings for this rank.

    every: with fsdp and hsdp, shard every model, or only those given to `Strategy.shard`.
    """
    method = compression(settings.compress)
    makers: dict[str, Callable[[], Strategy]] = {
        "single": Strategy,
        "ddp": lambda: Ddp(ranks, rng_digest=random_digest, compression=method),
        "fsdp": lambda: Fsdp(ranks, settings, random_digest, method, every),
        "hsdp": lambda: Fsdp(ranks, settings, random_digest, method, every, settings.machines),
        "exact": lambda: Exact(
            ranks,
            weighted_sizes(settings.shares, settings.weights or [1.0] * ranks.world_size),
            rng_digest=random_digest,
        ),
    }
    return makers[settings.strategy]()
