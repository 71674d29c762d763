"""Does the number of processes change the result? `python -m benchmarks.same_result [libraries]` prints a table.

One epoch of a linear model with a global batch of 16, over 103 and 96 samples: how many samples 1 to 4 processes
train on, and how far their weights are from those of one process. Libraries that are not installed are left out
(pip install accelerate lightning pytorch-ignite).
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

from benchmarks.runs import SCRIPTS, duoka, output, torchrun

LIBRARIES = {"duoka": "duoka", "accelerate": "accelerate", "fabric": "lightning", "ignite": "ignite"}
CASES = [(103, "in-order"), (103, "shuffled"), (96, "in-order"), (96, "shuffled")]
WORKERS = (1, 2, 3, 4)
SCRIPT = SCRIPTS / "same_result.py"


def result(library: str, workers: int, samples: int, order: str) -> tuple[int, list[float]]:
    """The samples trained on, and the weights."""
    words = [library, str(samples), order]
    command = duoka(workers, SCRIPT, *words) if library == "duoka" else [*torchrun(workers, SCRIPT), *words]
    line = next(line for line in output(command).splitlines() if line.startswith("["))
    seen, weights = json.loads(line)
    return seen, weights


def main() -> int:
    asked = sys.argv[1:] or list(LIBRARIES)
    print(
        f"{'library':<12}{'samples':<9}{'order':<10}{'trained on, by 1 / 2 / 3 / 4':<31}largest difference of weights"
    )
    same = True
    for library in asked:
        if find_spec(LIBRARIES[library]) is None:
            print(f"{library:<12}not installed")
            continue
        for samples, order in CASES:
            results = [result(library, workers, samples, order) for workers in WORKERS]
            seen = " / ".join(str(count) for count, _ in results)
            one = results[0][1]
            apart = max(abs(a - b) for _, other in results for a, b in zip(one, other, strict=True))
            print(f"{library:<12}{samples:<9}{order:<10}{seen:<31}{apart:.1e}", flush=True)
            same = same and (library != "duoka" or (apart < 1e-5 and {count for count, _ in results} == {samples}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
