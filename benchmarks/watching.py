"""What it costs a step of 1 ms that every rank tells where it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, Samples, in_turn, output
from benchmarks.table import Row

STEP = 1000.0  # microseconds


def measure(quick: bool) -> Iterator[Row]:
    """A step of 1 ms and what it spends on telling, against the step alone."""
    rounds = 1 if quick else ROUNDS
    times = _in_turn(("board", "watcher"), rounds) | _in_turn(("recorder", "silent"), 2 * rounds)
    alone = Samples((STEP,), "us")
    yield Row("a step of 1 ms that tells on the board (plain), against the step alone", times["board"], alone, 1.01)
    yield Row(
        "a step of 1 ms that torch's recorder notes (distributed), against the same without",
        times["recorder"],
        times["silent"],
        1.01,
    )
    yield Row("a step of 1 ms, and its part of what the watching process does", times["watcher"], alone, 1.01)


def _in_turn(ways: Sequence[str], rounds: int) -> dict[str, Samples]:
    return in_turn({how: lambda how=how: _step_that_tells(how) for how in ways}, rounds, "us", warm_up=False)


def _step_that_tells(how: str) -> float:
    return STEP + float(output([BIN / "python", SCRIPTS / "telling.py", how]))
