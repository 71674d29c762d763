"""What duoka's API costs: a step on two workers, batches from memory, and the import."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, duoka, in_turn, output
from benchmarks.table import Row

STEPS = {"mlp": ("a small MLP, batch 256", 1.15, 1.03), "cnn": ("a CNN, batch 64 of 3x32x32", 1.03, 1.03)}
LOADING = {"floats": ("64 floats", 1 / 8), "images": ("28x28 uint8, transformed", 1 / 3)}


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step that reports loss and accuracy of the whole batch; microseconds for a batch."""
    rounds = 1 if quick else ROUNDS
    for model, (words, bar, bar_local) in STEPS.items():
        contestants = {
            "global": lambda model=model: float(output(duoka(2, SCRIPTS / "training_api.py", model))),
            "local": lambda model=model: float(output(duoka(2, SCRIPTS / "training_api.py", model, "local"))),
            "by hand": lambda model=model: float(output(duoka(2, SCRIPTS / "training_ddp.py", model))),
        }
        times = in_turn(contestants, rounds, "ms", warm_up=False)
        yield Row(f"{words}: the API on 2 workers, against DDP by hand", times["global"], times["by hand"], bar)
        yield Row(f"{words}: the same, view='local'", times["local"], times["by hand"], bar_local)
    for what, (words, bar) in LOADING.items():
        contestants = {
            who: lambda who=who, what=what: float(output([BIN / "python", SCRIPTS / "loading.py", who, what]))
            for who in ("duoka", "torch")
        }
        times = in_turn(contestants, rounds, "us", warm_up=False)
        yield Row(f"a batch of 64 of {words}, against DataLoader", times["duoka"], times["torch"], bar)
    importing = "import sys, time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    contestants = {
        what: lambda what=what: float(output([BIN / "python", "-c", importing.format(what)]))
        for what in ("torch, duoka", "torch")
    }
    times = in_turn(contestants, rounds, "s")
    yield Row("import torch and duoka, against torch", times["torch, duoka"], times["torch"], 1.1)
