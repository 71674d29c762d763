"""Does the number of processes change the result? Samples trained on and weights, for duoka and its peers.

One epoch of a linear model with a global batch of 16, over 103 and 96 samples, shuffled or not, on 1 to 4 processes.
Libraries that are not installed are left out (pip install -e '.[peers]').
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec

from benchmarks.runs import BIN, SCRIPTS, duoka, output, torchrun
from benchmarks.table import Finding

LIBRARIES = {  # the script's word and the package
    "duoka": ("duoka", "duoka"),
    "Accelerate": ("accelerate", "accelerate"),
    "Accelerate, seedable sampler": ("accelerate-seedable", "accelerate"),
    "Accelerate, `split_batches`": ("accelerate-split", "accelerate"),
    "Fabric": ("fabric", "lightning"),
    "Ignite": ("ignite", "ignite"),
}
CASES = {
    "103": "103 samples, in order",
    "103s": "103 samples, shuffled",
    "96": "96 samples, in order",
    "96s": "96 samples, shuffled",
}
WORKERS = (1, 2, 3, 4)  # at 3, peers whose batch is each process's cannot have 16: there only samples are compared
SCRIPT = SCRIPTS / "same_result.py"
ROUNDING = 1e-5


def measure(quick: bool) -> Iterator[Finding]:
    """Samples trained on by 1 / 2 / 3 / 4 processes; and how far the weights of 2 are from those of one."""
    for who, (library, package) in LIBRARIES.items():
        if find_spec(package) is None:
            continue
        with ThreadPoolExecutor(2) as pool:  # nothing is timed
            by_workers = list(pool.map(partial(results, library), WORKERS[:2] if quick else WORKERS))
        for case, found in zip(CASES, zip(*by_workers, strict=True), strict=True):
            seen = ["refused" if it is None else str(it[0]) for it in found]
            one, *others = (it[1] for it in found if it is not None)
            apart = [max(abs(a - b) for a, b in zip(one, other, strict=True)) for other in others]
            same = set(seen) == {case.rstrip("s")} and max(apart) < ROUNDING
            yield Finding(CASES[case], who, f"{' / '.join(seen)}; {apart[0]:.0e}", holds=same or who != "duoka")


def results(library: str, workers: int) -> list[tuple[int, list[float]] | None]:
    """For each case the samples trained on, and the weights; None where the library refuses it."""
    if library == "duoka":
        command = duoka(workers, SCRIPT)
    elif workers == 1:
        command = [BIN / "python", SCRIPT]
    else:
        command = torchrun(workers, "--standalone", SCRIPT)
    return [
        json.loads(line)
        for line in output([*command, library, *CASES]).splitlines()
        if line.startswith(("[", "null"))
    ]
