"""The strategies by name. A new one is a file and a line here (and in `planning/plan.py`, without torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from duoka.collectives.base import Collectives
from duoka.planning.rows import weighted_sizes
from duoka.strategies.base import Single, Strategy
from duoka.strategies.compress import compression
from duoka.strategies.ddp import Ddp
from duoka.strategies.exact import Exact
from duoka.strategies.fsdp import Fsdp
from duoka.view.random.generators import random_digest

__all__ = ["Ddp", "Exact", "Fsdp", "Single", "Strategy", "create"]


def create(
    name: str,
    ranks: Collectives,
    compress: str = "none",
    shares: int = 0,
    weights: Sequence[float] = (),
    blocks: Sequence[str] = (),
    checkpoint_activations: bool = False,
    cpu_offload: bool = False,
    every: bool = True,
    machines: Sequence[Sequence[int]] = (),
) -> Strategy:
    """Create the strategy `name` for this rank.

    compress: of gradients between ranks (compress.py). With `exact`: shares: of each batch; weights: in proportion to
    which ranks compute them; empty: even. With `fsdp`: blocks: classes of modules; empty: found in lists.
    checkpoint_activations: of blocks. cpu_offload: of parts. every: shard every model, or only those given to
    `Strategy.shard`. machines: with `hsdp`, the ranks of each machine.
    """

    def rng_digest() -> int:
        return random_digest() & 0xFFFF

    sharded = ranks, rng_digest, blocks, checkpoint_activations
    makers: dict[str, Callable[[], Strategy]] = {
        "single": Single,
        "ddp": lambda: Ddp(ranks, rng_digest=rng_digest, compression=compression(compress)),
        "fsdp": lambda: Fsdp(*sharded, every, compression(compress), offloads=cpu_offload),
        "hsdp": lambda: Fsdp(*sharded, every, None, machines, cpu_offload),
        "exact": lambda: Exact(
            ranks, weighted_sizes(shares, weights or [1.0] * ranks.world_size), rng_digest=rng_digest
        ),
    }
    return makers[name]()
