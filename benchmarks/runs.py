"""Running contestants in turn, and what was measured."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROUNDS = 3  # of everything, so that all of it takes at most 15 minutes on two cores
SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
FROM_OUTSIDE = ("CUDA_", "GLOO_", "MASTER_", "OMP_", "PYTHON", "TORCHELASTIC_")  # must make no difference
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Samples:
    """What was measured of one contestant, in `unit`."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"{self.median:.3g} {self.unit} [{low:.3g}-{high:.3g}]"


def in_turn(
    contestants: Mapping[str, Callable[[], float]], rounds: int, unit: str, warm_up: bool = True
) -> dict[str, Samples]:
    """Measure all contestants alternately, so that a slow moment meets each of them.

    warm_up: in a first round that does not count; without it where a contestant is a script that warms up by itself.
    """
    values: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + warm_up):
        for name, contestant in contestants.items():
            value = contestant()
            if number >= warm_up:
                values[name].append(value)
    return {name: Samples(tuple(measured), unit) for name, measured in values.items()}


def surroundings() -> dict[str, str]:
    """The environment of a run: this one without what could make a difference."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FROM_OUTSIDE)}
    return {name: value for name, value in kept.items() if name not in RANKS}


def output(command: Sequence[str | Path]) -> str:
    """What a command prints, which must end well."""
    result = subprocess.run(command, env=surroundings(), capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {result.returncode}:\n{result.stderr}")
    return result.stdout


def told(command: Sequence[str | Path]) -> Callable[[], float]:
    """The number that a command prints last."""
    return lambda: float(output(command).split()[-1])


def duoka(workers: int, *words: str | Path) -> list[str | Path]:
    """The command for a run with so many workers on the CPU."""
    return duoka_on(f"cpu:{workers}", *words)


def duoka_on(devices: str, *words: str | Path) -> list[str | Path]:
    """The command for a run on these devices."""
    return [BIN / "duoka", "run", "--quiet", "--devices", devices, *words]


def torchrun(workers: int, *words: str | Path) -> list[str | Path]:
    """The same for torchrun."""
    return [BIN / "torchrun", "--nproc_per_node", str(workers), *words]
