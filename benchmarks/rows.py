"""A step on workers of different speed: with measured shares of a batch, against what each worker does alone.

Workers are slowed by the quotas of control groups, which only root can set; all quotas together leave cores idle.
A slow worker's fixed time for a step is as slow as its rows, unlike that of a slow GPU, whose host may be fast; and a
quota makes it wait for up to a period each time when ranks meet, twice in a step. Of the small model's step these are
a tenth on four workers; the large one's takes twice as long, and is the compute-bound case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.runs import ROUNDS, SCRIPTS, Samples, duoka, in_turn, told
from benchmarks.table import Row

SCRIPT = SCRIPTS / "rows.py"
GROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = 7_000  # microseconds, in each of which a quota may be used
USED = 0.8  # of the cores, by all workers together
BATCHES = {"small": 240, "large": 480}  # rows for each model, with which no tensor is larger than 32 MiB
SHORT = 64  # rows of a short step
CORRECTED = 96  # steps until shares are measured, and corrected
TWO, FOUR = "2 workers, one at half speed", "4 workers at speeds 1, 1, 1/2 and 1/4"
# Relative speeds, the model, and the bar: 1 divided by the least part of the workers' rows per second.
WORKERS = {
    f"{TWO}: a CNN's step": ((1.0, 0.5), "small", 1 / 0.95),
    f"{FOUR}: a CNN's step": ((1.0, 1.0, 0.5, 0.25), "large", 1 / 0.93),
    f"{FOUR}: a small CNN's step": ((1.0, 1.0, 0.5, 0.25), "small", None),
}


def is_possible() -> bool:
    """Whether this process may slow others here."""
    return os.access(GROUPS / "cpu.cfs_quota_us", os.F_OK) and os.access(GROUPS, os.W_OK)


def measure(quick: bool) -> Iterator[Row]:
    """Milliseconds for a step, as the script measures them. Ideal: all workers' rows per second alone, together."""
    if not is_possible():
        return
    for words, (speeds, model, bar) in WORKERS.items():
        batch = BATCHES[model]
        with slowed(speeds) as groups:
            contestants = {
                f"{speed}": _step([groups[speeds.index(speed)]], model, batch, 1, 3) for speed in set(speeds)
            }
            contestants |= {
                "even": _step(groups, model, batch, 2, 5, "--rows", "even"),
                "auto": _step(groups, model, batch, CORRECTED + 4, 30, "--rows", "auto"),
            }
            times = in_turn(contestants, 1, "ms", warm_up=False)
        alone = zip(*(times[f"{speed}"].values for speed in speeds), strict=True)
        ideal = Samples(tuple(1 / sum(1 / time for time in seconds) for seconds in alone), "ms")
        yield Row(f"{words}, against all workers' rows per second alone", times["auto"], ideal, bar)
        yield Row(f"{words}, with even shares", times["even"], ideal)
    with slowed((1.0, 1.0)) as groups:
        contestants = {
            rows: _step(groups, "small", SHORT, 10, 100, "--rows", rows, clock="thread_time")
            for rows in ("auto", "even")
        }
        times = in_turn(contestants, 1 if quick else ROUNDS, "ms", warm_up=False)
    words = "2 equal workers: processor time of a CNN's step with measured shares, against even ones"
    yield Row(words, times["auto"], times["even"], 1.01)


def _step(
    groups: Sequence[Path], model: str, batch: int, skipped: int, steps: int, *words: str, clock: str = "perf_counter"
) -> Callable[[], float]:
    numbers = map(str, (batch, skipped, steps))
    return told(duoka(len(groups), *words, "--threads", "1", SCRIPT, clock, model, *numbers, *groups))


@contextmanager
def slowed(speeds: Sequence[float]) -> Iterator[list[Path]]:
    """Control groups of these relative speeds, for as long as the context lasts."""
    whole = USED * len(os.sched_getaffinity(0)) / sum(speeds)
    with ExitStack() as stack:
        top = stack.enter_context(_group(GROUPS / f"duoka-{os.getpid()}"))
        (top / "cpu.shares").write_text("262144")  # others on this machine make no difference
        groups = [stack.enter_context(_group(top / str(rank))) for rank in range(len(speeds))]
        for group, speed in zip(groups, speeds, strict=True):
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD * min(whole, 1.0) * speed)))
        yield groups


@contextmanager
def _group(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()
