"""What a step costs on two machines, by the delay of the network between them, against DDP by hand under torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import switch
from benchmarks.runs import BIN, ROUNDS, SCRIPTS, Samples, surroundings
from benchmarks.table import Row

DELAYS = (1, 10, 40)  # milliseconds of a round trip
REPORTS = ("no number read", "the loss read", "loss, accuracy, clipping")
BAR = 1.1
PORT = 29650
PLAIN, BY_HAND = SCRIPTS / "far.py", SCRIPTS / "far_ddp.py"
KEY = {"DUOKA_KEY": "a benchmark has no secrets", "PYTHONHASHSEED": "0"}


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step of a small MLP, batch 128, as the scripts measure them."""
    if not switch.is_possible():
        print("two machines need root, ip and /dev/net/tun: not measured", file=sys.stderr)
        return
    for delay in DELAYS:
        with switch.network(delay / 1e3):
            rounds = [(_on_both(_duoka), _on_both(_torchrun)) for _ in range(1 if quick else ROUNDS)]
        for place, words in enumerate(REPORTS):
            this, against = (Samples(tuple(one[place] for one in of), "ms") for of in zip(*rounds, strict=True))
            yield Row(f"two machines, a round trip of {delay} ms, {words}: against DDP by hand", this, against, BAR)


def _duoka(machine: int) -> list[str | Path]:
    words = f"run -q --devices cpu:1 --machines 2 --rendezvous {switch.ADDRESSES[0]}:{PORT} --machine {machine}"
    return [BIN / "duoka", *words.split(), PLAIN]


def _torchrun(machine: int) -> list[str | Path]:
    place = f"--master-addr {switch.ADDRESSES[0]} --master-port {PORT}"
    words = f"--nnodes 2 --node-rank {machine} --nproc-per-node 1 {place}"
    return [BIN / "torchrun", *words.split(), BY_HAND]


def _on_both(command: Callable[[int], list[str | Path]]) -> list[float]:
    """The numbers that the first machine's command prints last."""
    env = surroundings() | KEY | {"GLOO_SOCKET_IFNAME": switch.DEVICE}
    started = [
        subprocess.Popen(
            switch.on_machine(machine, command(machine)),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine in range(2)
    ]
    said = [one.communicate(timeout=300) for one in started]
    if any(one.returncode for one in started):
        raise SystemExit("\n".join(error for _, error in said))
    return [float(word) for word in said[0][0].splitlines()[-1].split()]
