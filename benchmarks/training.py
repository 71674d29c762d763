"""What a step costs on two workers: an unedited script under duoka, and DistributedDataParallel by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.runs import ROUNDS, SCRIPTS, Samples, duoka, in_turn, output
from benchmarks.table import Row

MODELS = {"mlp": ("a small MLP, batch 256", 1.15), "cnn": ("a CNN, batch 64 of 3x32x32", 1.03)}
PLAIN, BY_HAND = SCRIPTS / "training.py", SCRIPTS / "training_ddp.py"


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step that reports loss and accuracy of the whole batch, as the scripts measure them."""
    rounds = 1 if quick else ROUNDS

    def in_turns(**commands: tuple[object, ...]) -> dict[str, Samples]:
        return in_turn({name: _timed(*words) for name, words in commands.items()}, rounds, "ms", warm_up=False)

    for model, (words, bar) in MODELS.items():
        times = in_turns(duoka=(PLAIN, model), by_hand=(BY_HAND, model))
        yield Row(f"{words}: a step on 2 workers, against DDP by hand", times["duoka"], times["by_hand"], bar)
    one = (PLAIN, "transformer")
    times = in_turns(one_stream=one, each_its_own=("--randomness", "worker", *one))
    words = "a transformer with dropout: one random stream, against one for each of 2 workers"
    yield Row(words, times["one_stream"], times["each_its_own"], 1.1)


def _timed(*words: object) -> Callable[[], float]:
    return lambda: float(output(duoka(2, *map(str, words))))
