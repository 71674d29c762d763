"""A model in parts, in a plain script with `--strategy fsdp`, beside torch's `fully_shard` by hand, on CPUs."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.runs import SCRIPTS, duoka, in_turn, told, torchrun
from benchmarks.table import Row

SCRIPT = SCRIPTS / "sharded.py"
ROUNDS = 2


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step, and MB that rank 0's resident memory grows by from before the model is made."""
    for what, unit in (("step", "ms"), ("memory", "MB")):
        found = in_turn(
            {
                "duoka": told(duoka(2, "--strategy", "fsdp", SCRIPT, what)),
                "by hand": told(torchrun(2, SCRIPT, what, "by_hand")),
            },
            1 if quick else ROUNDS,
            unit,
            warm_up=False,
        )
        words = f"20 million parameters with AdamW in parts, {what} on 2 workers: duoka against fully_shard by hand"
        yield Row(words, found["duoka"], found["by hand"])
