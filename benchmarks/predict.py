"""`duoka.predict` over two CPU devices, against two processes that do not talk: what this machine can give.

Two busy processes on a shared machine are not twice as fast as one, so the ceiling is measured in the same run.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, Samples, in_turn, surroundings, told
from benchmarks.table import Row

SCRIPT = [BIN / "python", SCRIPTS / "predicting.py"]


def measure(quick: bool) -> Iterator[Row]:
    """Seconds for 10,000 items of uneven cost; megabytes at the peak."""
    times = in_turn({"predict": told([*SCRIPT, "predict"]), "apart": apart}, 1 if quick else ROUNDS, "s")
    yield Row("predict on 2 CPU devices, against two separate processes", times["predict"], times["apart"])
    pairs = zip(times["apart"].values, times["predict"].values, strict=True)
    reached = Samples(tuple(apart / predict for apart, predict in pairs), "")
    yield Row(
        "0.9 of the speed of two separate processes, against predict's speed", Samples((0.9,), ""), reached, bar=1.0
    )
    peaks = in_turn(
        {str(items): told([*SCRIPT, "memory", str(items)]) for items in (1_000, 100_000)},
        1 if quick else ROUNDS,
        "MB",
        warm_up=False,
    )
    yield Row("predict: peak memory over 100,000 items against 1,000", peaks["100000"], peaks["1000"], bar=1.1)


def apart() -> float:
    """Seconds that two processes take for a half each, started together: their mean, as work evenly shared."""
    commands = [[*SCRIPT, "apart", str(which)] for which in (0, 1)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": surroundings()}
    processes = [subprocess.Popen(command, **pipes) for command in commands]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in processes) / len(processes)
