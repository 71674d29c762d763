"""What a step costs on two machines, by the delay of the network between them, against DDP by hand under torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import switch
from benchmarks.runs import BIN, ROUNDS, SCRIPTS, in_turn, surroundings
from benchmarks.table import Finding, Row

DELAYS = (1, 10, 40)  # milliseconds of a round trip
REPORTS = {"none": "no number read", "loss": "the loss read", "all": "loss, accuracy, clipping"}
BAR = 1.1
PORT = 29650
PLAIN, BY_HAND = SCRIPTS / "far.py", SCRIPTS / "far_ddp.py"
KEY = {"DUOKA_KEY": "a benchmark has no secrets", "PYTHONHASHSEED": "0"}


def measure(quick: bool) -> Iterator[Row | Finding]:
    """Milliseconds for a step of a small MLP, batch 128, as the scripts measure them."""
    if not switch.is_possible():
        print("two machines need root, ip and /dev/net/tun: not measured", file=sys.stderr)
        return
    for delay in DELAYS:
        with switch.network(delay / 1e3):
            for report, words in REPORTS.items():
                contestants = {"duoka": _on_both(_duoka, report), "by hand": _on_both(_torchrun, report)}
                times = in_turn(contestants, 1 if quick else ROUNDS, "ms", warm_up=False)
                what = f"two machines, a round trip of {delay} ms, {words}: against DDP by hand"
                yield Row(what, times["duoka"], times["by hand"], BAR)


def _duoka(machine: int, report: str) -> list[str | Path]:
    words = f"run -q --devices cpu:1 --machines 2 --meet {switch.ADDRESSES[0]}:{PORT} --machine {machine}"
    return [BIN / "duoka", *words.split(), PLAIN, report]


def _torchrun(machine: int, report: str) -> list[str | Path]:
    place = f"--master-addr {switch.ADDRESSES[0]} --master-port {PORT}"
    words = f"--nnodes 2 --node-rank {machine} --nproc-per-node 1 {place}"
    return [BIN / "torchrun", *words.split(), BY_HAND, report]


def _on_both(command: Callable[[int, str], Sequence[str | Path]], report: str) -> Callable[[], float]:
    """The number that the first machine's command prints."""

    def run() -> float:
        env = surroundings() | KEY | {"GLOO_SOCKET_IFNAME": switch.DEVICE}
        started = [
            subprocess.Popen(
                switch.on_machine(machine, command(machine, report)),
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
        return float(said[0][0].split()[-1])

    return run
