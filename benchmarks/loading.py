"""What it costs to get batches from memory, and to import duoka."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, in_turn, told
from benchmarks.table import Row

LOADING = {"floats": ("64 floats", 1 / 8), "images": ("28x28 uint8, transformed", 1 / 3)}
IMPORTING = "import sys, time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def measure(quick: bool) -> Iterator[Row]:
    """Microseconds for a batch; seconds for an import."""
    rounds = 1 if quick else ROUNDS
    for what, (words, bar) in LOADING.items():
        contestants = {who: told([BIN / "python", SCRIPTS / "loading.py", who, what]) for who in ("duoka", "torch")}
        times = in_turn(contestants, rounds, "us", warm_up=False)
        yield Row(f"a batch of 64 of {words}, against DataLoader", times["duoka"], times["torch"], bar)
    contestants = {what: told([BIN / "python", "-c", IMPORTING.format(what)]) for what in ("torch, duoka", "torch")}
    times = in_turn(contestants, rounds, "s")
    yield Row("import torch and duoka, against torch", times["torch, duoka"], times["torch"], 1.1)
