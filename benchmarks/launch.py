"""From the command to the first finished all-reduce, and to the first finished step of a plain script."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, duoka, in_turn, output, torchrun
from benchmarks.table import Row

ALL_REDUCE, ONE_STEP = SCRIPTS / "all_reduce.py", SCRIPTS / "one_step.py"


def measure(quick: bool) -> Iterator[Row]:
    """Seconds of wall time."""
    rounds = 1 if quick else ROUNDS
    times = in_turn(
        {
            "duoka 1": started(duoka(1, ALL_REDUCE)),
            "duoka 2": started(duoka(2, ALL_REDUCE)),
            "duoka 8": started(duoka(8, ALL_REDUCE)),
            "torchrun 2": started(torchrun(2, ALL_REDUCE)),
            "torchrun 8": started(torchrun(8, ALL_REDUCE)),
            "python step": started([BIN / "python", ONE_STEP]),
            "duoka step": started(duoka(2, ONE_STEP)),
        },
        rounds,
        "s",
    )
    yield Row("launch, 2 workers: duoka against torchrun", times["duoka 2"], times["torchrun 2"], bar=0.5)
    yield Row("launch, 8 workers: duoka against torchrun", times["duoka 8"], times["torchrun 8"], bar=0.25)
    yield Row("launch: 8 workers against 1", times["duoka 8"], times["duoka 1"], bar=1.5)
    yield Row("first step of a plain script: 2 workers against python", times["duoka step"], times["python step"])


def started(command: Sequence[str | Path]) -> Callable[[], float]:
    """How long it takes until the script of `command` prints the time, by the clock that all processes share."""

    def seconds() -> float:
        begin = time.monotonic()
        return float(output(command).split()[-1]) - begin

    return seconds
