"""`make demo`: an ordinary script under `python` and under `duoka run`, side by side.

Ends with exit code 1 if a printed line or the weights differ.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from duoka.hardware import inventory

SCRIPT = Path("examples/digits.py")
TOLERANCE = 1e-5  # of the largest weight: sums in another order differ in the last places


@dataclass(frozen=True)
class Run:
    """What one run printed, how long it took from the command to its end, and the weights it saved."""

    lines: list[str]
    seconds: float
    weights: dict[str, torch.Tensor]


def run(command: list[str | Path], weights: Path, env: dict[str, str]) -> Run:
    """Run a command that saves weights; what it writes to standard error is shown."""
    shown = " ".join(Path(word).name if Path(word).is_absolute() else str(word) for word in command)
    print(f"$ {shown}", flush=True)
    start = time.perf_counter()
    done = subprocess.run([*command, "--save", weights], stdout=subprocess.PIPE, text=True, env=os.environ | env)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"{shown} ended with exit code {done.returncode}")
    return Run(done.stdout.splitlines(), seconds, torch.load(weights, map_location="cpu", weights_only=True))


def side_by_side(one: Run, many: Run) -> int:
    """Print both outputs next to each other; returns how many lines differ."""
    width = max(map(len, ("python", *one.lines)))
    print(f"\n  {'python':{width}}     duoka run")
    different = 0
    for left, right in zip_longest(one.lines, many.lines, fillvalue=""):
        different += left != right
        print(f"  {left:{width}}  {'=' if left == right else '#'}  {right}")
    return different


def largest_difference(one: Run, many: Run) -> float:
    """Of all weights, relative to the largest weight of the same tensor."""
    if one.weights.keys() != many.weights.keys():
        sys.exit(f"other names: {sorted(one.weights)} and {sorted(many.weights)}")
    return max(
        float((weight - many.weights[name]).abs().max() / weight.abs().max()) for name, weight in one.weights.items()
    )


def main() -> int:
    """Run both, compare, and say what came out."""
    several_gpus = len(inventory.read().gpus) > 1
    devices = "auto" if several_gpus else "cpu:2"
    env = {} if several_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    duoka = Path(sys.executable).with_name("duoka")
    with TemporaryDirectory() as folder:
        one = run([sys.executable, SCRIPT], Path(folder, "one.pt"), env)
        many = run([duoka, "run", "--devices", devices, SCRIPT], Path(folder, "many.pt"), {})
    different = side_by_side(one, many)
    difference = largest_difference(one, many)
    print(f"\n  lines      {len(one.lines) - different} of {len(one.lines)} the same")
    print(f"  weights    largest difference {difference:.1e}, relative to the largest weight of the tensor")
    print(f"  time       {one.seconds:.1f} s and {many.seconds:.1f} s, imports included")
    return int(different > 0 or difference > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
