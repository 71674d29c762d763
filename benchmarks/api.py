"""What duoka's API costs: a step on two workers, batches from memory, and the import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, duoka, in_turn, output, torchrun
from benchmarks.table import Row

STEPS = {"mlp": ("a small MLP, batch 256", 1.15, 1.03), "cnn": ("a CNN, batch 64 of 3x32x32", 1.03, 1.03)}
PEERS = {"accelerate": ("Accelerate", "accelerate"), "fabric": ("Fabric", "lightning")}
LOADING = {"floats": ("64 floats", 1 / 8), "images": ("28x28 uint8, transformed", 1 / 3)}


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step that reports loss and accuracy of the whole batch; microseconds for a batch."""
    rounds = 1 if quick else ROUNDS
    peers = {peer: name for peer, (name, module) in PEERS.items() if find_spec(module) is not None}
    if len(peers) < len(PEERS):
        print("not all peers are installed: pip install 'duoka[peers]'", file=sys.stderr)
    for model, (words, bar, bar_local) in STEPS.items():
        contestants = {
            "global": lambda model=model: float(output(duoka(2, SCRIPTS / "training_api.py", model))),
            "local": lambda model=model: float(output(duoka(2, SCRIPTS / "training_api.py", model, "local"))),
            "by hand": lambda model=model: float(output(duoka(2, SCRIPTS / "training_ddp.py", model))),
        }
        for peer in peers:
            script = (SCRIPTS / "training_peers.py", peer, model)
            contestants[peer] = lambda script=script: float(output(torchrun(2, *script)).split()[-1])
        times = in_turn(contestants, rounds, "ms", warm_up=False)
        yield Row(f"{words}: the API on 2 workers, against DDP by hand", times["global"], times["by hand"], bar)
        yield Row(f"{words}: the same, view='local'", times["local"], times["by hand"], bar_local)
        for peer, name in peers.items():
            yield Row(f"{words}: the API, against {name} doing the same", times["global"], times[peer], 1.0)
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
