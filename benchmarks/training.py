"""What a step costs on two workers: an unedited script under duoka, and DistributedDataParallel by hand."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.runs import SCRIPTS, Samples, duoka, in_turn, output
from benchmarks.table import Row

MODELS = {"mlp": ("a small MLP, batch 256", 1.15), "cnn": ("a CNN, batch 64 of 3x32x32", 1.03)}


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step that reports loss and accuracy of the whole batch, as the scripts measure them."""
    for model, (words, bar) in MODELS.items():
        times = _in_turn(model, 3 if quick else 9)
        yield Row(f"{words}: a step on 2 workers, against DDP by hand", times["duoka"], times["by hand"], bar)


def _in_turn(model: str, rounds: int) -> dict[str, Samples]:
    return in_turn(
        {
            "duoka": lambda: float(output(duoka(2, SCRIPTS / "training.py", model))),
            "by hand": lambda: float(output(duoka(2, SCRIPTS / "training_ddp.py", model))),
        },
        rounds,
        "ms",
    )
