"""From the kill of a rank to the first all-reduce that is finished after it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, Samples, duoka, in_turn, surroundings
from benchmarks.table import Row

SCRIPT = SCRIPTS / "restarts.py"
# Without it new ranks find the addresses of dead ones in torchrun's store, and mostly do not meet again.
STORE_FIX = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
RECOVERIES = 8  # of duoka, none of which may fail; torchrun's are slow, and fewer are enough for a median


def measure(quick: bool) -> Iterator[Row]:
    """Seconds from one to the other. A run that does not go on ends the benchmark."""
    beside = 1 if quick else ROUNDS
    contestants = {
        f"{name} {workers}": recovered(command, more)
        for workers in (2, 3)
        for name, command, more in (
            ("duoka", duoka(workers, "--restarts", "1", SCRIPT), {}),
            ("torchrun", torchrun(workers), STORE_FIX),
        )
    }
    times = in_turn(contestants, beside, "s")
    if not quick:
        alone = {name: run for name, run in contestants.items() if name.startswith("duoka")}
        for name, more in in_turn(alone, RECOVERIES - beside, "s").items():
            times[name] = Samples(times[name].values + more.values, "s")
    for workers in (2, 3):
        what = f"restart after a kill, {workers} workers: duoka against torchrun"
        yield Row(what, times[f"duoka {workers}"], times[f"torchrun {workers}"], bar=0.2)


def recovered(command: Sequence[str | Path], more: Mapping[str, str]) -> Callable[[], float]:
    """How long it takes `command`, whose script kills a rank of its own, until all have met again."""

    def seconds() -> float:
        env = surroundings() | dict(more)
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        said = dict(line.split() for line in result.stdout.splitlines() if line.startswith(("killed ", "met ")))
        if result.returncode != 0 or len(said) != 2:
            words = " ".join(map(os.fspath, command))
            raise SystemExit(f"{words} did not go on, and ended with {result.returncode}:\n{result.stderr}")
        return float(said["met"]) - float(said["killed"])

    return seconds


def torchrun(workers: int) -> list[str | Path]:
    """The command that has torchrun start its workers again once, at a port of its own choice."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return [BIN / "torchrun", "--nproc-per-node", str(workers), "--max-restarts", "1", *meeting, SCRIPT]
