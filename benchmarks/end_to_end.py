"""The FashionMNIST net as the guides write it, from the command to its end: duoka run against python.

The script is examples/fashion_mnist.py, unedited; its data have the real shape (60,000 and 10,000 images of 28x28
bytes, in IDX files) and are made here, as the real ones are not ours to ship.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.gpus import taken
from benchmarks.runs import BIN, ROUNDS, duoka, in_turn
from benchmarks.table import Row

SCRIPT = Path(__file__).parents[1] / "examples/fashion_mnist.py"


def measure(quick: bool) -> Iterator[Row]:
    """Seconds of wall time, imports and reading included."""
    with tempfile.TemporaryDirectory() as folder:
        for part, count in (("train", 60_000), ("t10k", 10_000)):
            write_clothes(Path(folder), part, count)
        words = (SCRIPT, "--data", folder, "--epochs", "1" if quick else "5")
        contestants = {
            "python": taken([BIN / "python", *words]),
            "duoka 1": taken(duoka(1, *words)),
            "duoka 2": taken(duoka(2, *words)),
        }
        times = in_turn(contestants, 1 if quick else ROUNDS, "s", warm_up=False)
    yield Row("FashionMNIST, 5 epochs, one device: duoka run against python", times["duoka 1"], times["python"], 1.05)
    yield Row("FashionMNIST, 5 epochs: 2 workers against python on all cores", times["duoka 2"], times["python"])


def write_clothes(folder: Path, part: str, count: int) -> None:
    """Images and labels as FashionMNIST's files have them: ten patterns and noise."""
    chance = np.random.default_rng(count)
    labels = chance.integers(0, 10, count, np.uint8)
    patterns = np.random.default_rng(0).integers(0, 200, (10, 28, 28), np.uint8)
    images = patterns[labels] + chance.integers(0, 56, (count, 28, 28), np.uint8)
    for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())
