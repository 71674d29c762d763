"""Does the number of processes change the result? `python -m benchmarks.same_result [libraries]` prints a table.

One epoch of a linear model with a global batch of 16, over 103 and 96 samples: how many samples 1 to 4 processes
train on, and how far their weights are from those of one process. Peers come by `pip install duoka[peers]`; one that
is not installed is a row that says so. Exit code 1 if duoka's own rows are not all equal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.runs import SCRIPTS, duoka, output, torchrun

LIBRARIES = {  # by the module that must be there
    "duoka": "duoka",
    "accelerate": "accelerate",
    "accelerate-seedable": "accelerate",
    "accelerate-split": "accelerate",
    "fabric": "lightning",
    "ignite": "ignite",
}
CASES = [(103, "in-order"), (103, "shuffled"), (96, "in-order"), (96, "shuffled")]
WORKERS = (1, 2, 3, 4)
SCRIPT = SCRIPTS / "same_result.py"


@dataclass(frozen=True)
class Result:
    """What one run came to. samples: that were trained on, all processes together; None: it was refused."""

    samples: int | None
    weights: tuple[float, ...] = ()


def result(library: str, workers: int, samples: int, order: str) -> Result:
    """Train with so many processes."""
    words = [library, str(samples), order]
    command = duoka(workers, SCRIPT, *words) if library == "duoka" else [*torchrun(workers, SCRIPT), *words]
    line = next(line for line in output(command).splitlines() if line.startswith(("[", "refused")))
    if line.startswith("refused"):
        return Result(None)
    seen, weights = json.loads(line)
    return Result(seen, tuple(weights))


def apart(results: Sequence[Result]) -> float:
    """The largest difference of any weight from that of one process."""
    ones = results[0].weights
    return max(abs(a - b) for other in results for a, b in zip(ones, other.weights, strict=False))


def main() -> int:
    asked = sys.argv[1:] or list(LIBRARIES)
    if unknown := set(asked) - set(LIBRARIES):
        print(f"there is no {', '.join(unknown)}; there are {', '.join(LIBRARIES)}", file=sys.stderr)
        return 2
    heads = ("library", "samples", "order", "trained on, by 1 / 2 / 3 / 4", "largest difference of weights")
    print("{:<21}{:<9}{:<10}{:<31}{}".format(*heads))
    same = True
    for library in asked:
        if find_spec(LIBRARIES[library]) is None:
            print(f"{library:<21}not installed")
            continue
        for samples, order in CASES:
            results = [result(library, workers, samples, order) for workers in WORKERS]
            seen = " / ".join(str(one.samples or "refused") for one in results)
            print(f"{library:<21}{samples:<9}{order:<10}{seen:<31}{apart(results):.1e}", flush=True)
            if library == "duoka":
                same = same and apart(results) < 1e-5 and all(one.samples == samples for one in results)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
