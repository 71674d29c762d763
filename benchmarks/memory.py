"""What the processes of a run hold together, when every worker has imported torch and does nothing."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.runs import ROUNDS, SCRIPTS, duoka, in_turn, surroundings, torchrun
from benchmarks.table import Row

IDLE = SCRIPTS / "idle.py"
PATIENCE = 120.0  # seconds


def measure(quick: bool) -> Iterator[Row]:
    """Proportional set size in MB: memory that several processes share counts once in all."""
    sizes = in_turn(
        {
            "duoka 1": held(duoka(1, IDLE), 1),
            "duoka 8": held(duoka(8, IDLE), 8),
            "torchrun 8": held(torchrun(8, IDLE), 8),
        },
        1 if quick else ROUNDS,
        "MB",
        warm_up=False,
    )
    yield Row("memory: 8 idle workers against 1", sizes["duoka 8"], sizes["duoka 1"], bar=2.0)
    yield Row("memory, 8 idle workers: duoka against torchrun", sizes["duoka 8"], sizes["torchrun 8"])


def held(command: Sequence[str | Path], workers: int) -> Callable[[], float]:
    """What a run of `command` holds once all its workers have said that they are ready."""

    def megabytes() -> float:
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(
                [*command, folder], env=surroundings(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                _wait_until(lambda: len(list(Path(folder).iterdir())) == workers)
                return sum(map(_proportional, _family(process.pid))) / 1e6
            finally:
                process.terminate()
                process.wait()

    return megabytes


def _wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit("the workers did not come to life")
        time.sleep(0.05)


def _family(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def _proportional(pid: int) -> float:
    """Bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return float(line.split()[1]) * 1024
    raise SystemExit("the kernel does not tell the proportional set size")
