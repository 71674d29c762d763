"""What it costs that the bits do not depend on the number of devices: a step on two workers, against ddp."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.runs import ROUNDS, SCRIPTS, duoka, in_turn, told
from benchmarks.table import Row

SCRIPT = SCRIPTS / "convolutions.py"
SHARES = {2: 1.15, 8: 1.35}  # and the bar of each


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step, as the script itself measures them."""
    exact = {f"{it}": told(duoka(2, "--strategy", "exact", "--shares", f"{it}", SCRIPT)) for it in SHARES}
    times = in_turn({"ddp": told(duoka(2, SCRIPT)), **exact}, 1 if quick else ROUNDS, "ms", warm_up=False)
    for shares, bar in SHARES.items():
        words = f"a CNN with BatchNorm, a step on 2 workers: exact with {shares} shares, against ddp"
        yield Row(words, times[f"{shares}"], times["ddp"], bar)
