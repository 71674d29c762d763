"""Loading 500 MB of safetensors into a model, against torch.load and load_state_dict of the same weights."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import duoka
from benchmarks.runs import ROUNDS, SCRIPTS, Samples, in_turn, surroundings
from benchmarks.table import Row

LAYERS = 30  # of 2048 by 2048: 16.8 MB each


def measure(quick: bool) -> Iterator[Row]:
    model = stack(LAYERS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(model.state_dict(), folder / "w.pth")
        duoka.save_weights(model, folder / "w.safetensors")
        loads: dict[str, Callable[[], object]] = {
            "torch": lambda: model.load_state_dict(torch.load(folder / "w.pth", weights_only=True)),
            "duoka": lambda: duoka.load_weights(model, folder / "w.safetensors"),
            "duoka, .pth": lambda: duoka.load_weights(model, folder / "w.pth"),
            "library": lambda: model.load_state_dict(load_file(folder / "w.safetensors")),
        }
        times = in_turn({name: timed(load) for name, load in loads.items()}, 1 if quick else 2 * ROUNDS, "s")
        yield Row("500 MB: load_weights against torch.load, load_state_dict", times["duoka"], times["torch"], bar=0.5)
        yield Row("the same, from .pth with its checksums compared", times["duoka, .pth"], times["torch"])
        yield Row("load_weights against the safetensors library", times["duoka"], times["library"])
        peak, size = map(float, output_of(folder / "w.safetensors", LAYERS))
        yield Row("peak memory of load_weights against the model", one(peak), one(size), bar=1.1)


def stack(layers: int) -> nn.Module:
    """A model of 16.8 MB a layer."""
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))


def timed(act: Callable[[], object]) -> Callable[[], float]:
    """Seconds that it takes."""

    def seconds() -> float:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    return seconds


def one(megabytes: float) -> Samples:
    return Samples((megabytes,), "MB")


def output_of(path: Path, layers: int) -> list[str]:
    """What the script of a process of its own says: the peak of its memory, and its model's size, in MB."""
    command = [sys.executable, SCRIPTS / "load_weights.py", path, str(layers)]
    return subprocess.run(command, env=surroundings(), capture_output=True, text=True, check=True).stdout.split()
