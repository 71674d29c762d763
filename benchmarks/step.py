"""What a step of a plain script costs on one device under `duoka run`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, duoka, in_turn, told
from benchmarks.table import Row

STEPS = SCRIPTS / "steps.py"


def measure(quick: bool) -> Iterator[Row]:
    """Microseconds for a step, as the script itself measures them."""
    times = in_turn(
        {
            "python": told([BIN / "python", STEPS]),
            "duoka": told(duoka(1, STEPS)),
        },
        1 if quick else ROUNDS,
        "us",
        warm_up=False,
    )
    yield Row("a step on one device: duoka run against python", times["duoka"], times["python"], bar=1.03)
