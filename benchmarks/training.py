"""What a step costs on two workers: a plain script, the API, DistributedDataParallel by hand, and the peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.runs import ROUNDS, SCRIPTS, duoka, in_turn, told, torchrun
from benchmarks.table import Row

MODELS = {"mlp": ("a small MLP, batch 256", 1.15), "cnn": ("a CNN, batch 64 of 3x32x32", 1.03)}
PEERS = {"accelerate": ("Accelerate", "accelerate"), "fabric": ("Fabric", "lightning")}
PLAIN, API, BY_HAND, OF_PEERS = (SCRIPTS / f"training{kind}.py" for kind in ("", "_api", "_ddp", "_peers"))


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step that reports loss and accuracy of the whole batch, as the scripts measure them."""
    rounds = 1 if quick else ROUNDS
    peers = {peer: name for peer, (name, module) in PEERS.items() if find_spec(module) is not None}
    if len(peers) < len(PEERS):
        print("not all peers are installed: pip install 'duoka[peers]'", file=sys.stderr)
    for model, (words, bar) in MODELS.items():
        contestants = {
            "plain": duoka(2, PLAIN, model),
            "api": duoka(2, API, model),
            "by hand": duoka(2, BY_HAND, model),  # not torchrun: threads and memory are the same for all three
            **{peer: torchrun(2, OF_PEERS, peer, model) for peer in peers},
        }
        times = in_turn({who: told(words) for who, words in contestants.items()}, rounds, "ms", warm_up=False)
        by_hand = times["by hand"]
        yield Row(f"{words}: a step on 2 workers, against DDP by hand", times["plain"], by_hand, bar)
        yield Row(f"{words}: the API on 2 workers, against DDP by hand", times["api"], by_hand, bar)
        for peer, name in peers.items():
            yield Row(f"{words}: the API, against {name} doing the same", times["api"], times[peer], 1.0)
    one = duoka(2, PLAIN, "transformer")
    each = [*one[:-2], "--randomness", "worker", *one[-2:]]
    times = in_turn({"one": told(one), "each": told(each)}, rounds, "ms", warm_up=False)
    words = "a transformer with dropout: one random stream, against one for each of 2 workers"
    yield Row(words, times["one"], times["each"], 1.1)
