"""How soon `duoka gpus` answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.runs import BIN, Samples, in_turn, output
from benchmarks.table import Row

ALLOWED = 0.25  # seconds more than an interpreter that does nothing


def measure(quick: bool) -> Iterator[Row]:
    """Seconds of wall time, beyond what starting python takes."""
    times = in_turn(
        {"gpus": taken([BIN / "duoka", "gpus"]), "python": taken([BIN / "python", "-c", "pass"])},
        5 if quick else 21,
        "s",
    )
    more = Samples(tuple(a - b for a, b in zip(times["gpus"].values, times["python"].values, strict=True)), "s")
    yield Row("duoka gpus: seconds more than python -c pass, against 0.25 s", more, Samples((ALLOWED,), "s"), bar=1.0)


def taken(command: Sequence[str | Path]) -> Callable[[], float]:
    """How long a command takes."""

    def seconds() -> float:
        begin = time.monotonic()
        output(command)
        return time.monotonic() - begin

    return seconds
