"""Measure a script's steps: each rank writes a file, and the command process reads it.

The status board counts the steps: those of the optimizer that has made most. The first ones warm up and do not count.
The result is the median of the others, so that an evaluation in a few steps does not change it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from duoka.plain.patching import Patches
from duoka.private.torch import tree_leaves
from duoka.trials.observer import TrialObserver, end_of, opened, watch_loaders
from duoka.view.tally import Tally

WARMUP = 10  # steps that do not count; of a shorter run, a third
LEAST = 5  # counted steps that are needed
WINDOWS = 5  # number of windows on an asynchronous device, which is synchronized at the end of each


class WindowEnd(NamedTuple):
    """The end of a window of steps on one rank; values are sums since the start."""

    step: int
    seconds: float  # by its clock
    waited: float  # seconds in collectives
    repeated: float  # seconds of work that every rank computes whole
    samples: float | None  # taken from loaders; None if they cannot be counted


@dataclass(frozen=True)
class Timing:
    """Times of one run, in seconds per step."""

    steps: int  # number of steps made
    counted: int  # of steps after the warm-up
    windows: tuple[float, ...]  # time per step of each window, on rank 0
    waited: float  # in collectives, the mean over ranks
    repeated: float  # of work that every rank computes whole
    costliest: str  # the most expensive line of this work
    samples: int | None  # per step, of all ranks; None if unknown
    threads: int  # of the CPU, for one operation

    @property
    def step(self) -> float:
        return median(self.windows)

    @property
    def middle(self) -> tuple[float, float]:
        """The first and third quartile of the windows' times."""
        if len(self.windows) < 2:
            return self.step, self.step
        low, _, high = quantiles(self.windows, n=4, method="inclusive")
        return low, high


def warmup_steps(steps: int, settling: int = 0) -> int:
    """Return how many of these steps do not count. settling: the first ones, before the warm-up."""
    return settling + min(WARMUP, max(0, steps - settling) // 3)


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file: its marks, its costliest line, and the CPU threads of one operation."""
    return folder / f"rank-{rank}.json"


class Timer(TrialObserver):
    """Times the steps of one run on a rank.

    device: type of the devices, such as "cpu". settling: first steps, after which those begin that are to be timed.
    """

    def __init__(self, wanted: int, seed: int, device: str, settling: int = 0) -> None:
        super().__init__(wanted, seed)
        self._device, warmup = device, warmup_steps(wanted, settling)
        # An asynchronous device is synchronized once per window only; one begins with the first counted step.
        self.window = 1 if device == "cpu" else max(1, (wanted - warmup) // WINDOWS)
        self._offset = warmup % self.window
        self._marks: list[WindowEnd] = []
        self._samples: int | None = 0  # None once they cannot be counted
        self._tally = Tally()  # replaced as soon as the view creates one

    def install(self) -> None:
        """Observe batches, work computed whole on every rank, and optimizer steps."""
        watch_loaders(self._count)
        Patches().around(Tally, "begin")(self._begin_tally)
        register_optimizer_step_post_hook(self._after)

    def close(self) -> None:
        costliest = next((f"{name} at {line}" for name, line in self._tally.shares()), "")
        with opened(rank_file(self.folder, self.slot.rank)) as file:
            file.write(json.dumps([self._marks, costliest, torch.get_num_threads()]))

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.slot.steps == self.steps:  # another optimizer of the same step
            return
        self.steps = self.slot.steps
        if self.steps % self.window == self._offset and not self.over:
            self._mark()
        if self.steps >= self.wanted:
            self.enough()

    def _mark(self) -> None:
        if self._device != "cpu":  # what the steps have launched is still being computed
            torch.accelerator.synchronize()
        repeated = sum(self._tally.seconds.values())
        self._marks.append(WindowEnd(self.steps, perf_counter(), self.slot.waited, repeated, self._samples))

    def _count(self, loader: Any, batch: Any) -> None:
        count = samples(batch, getattr(loader, "batch_size", None))
        self._samples = None if count is None or self._samples is None else self._samples + count

    def _begin_tally(self, original: Callable[[Tally], None], tally: Tally) -> None:
        self._tally = tally
        original(tally)


def samples(batch: Any, limit: int | None) -> int | None:
    """Count the samples in a loader's batch: the common first dimension of its tensors, or None if they differ.

    limit: the loader's batch size, or None.
    """
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        return None
    size = int(sizes.pop())
    return size if limit is None or size <= limit else None


def read(folder: Path, settling: int = 0) -> Timing:
    """Read the files of a run that succeeded. settling: as for `Timer`."""
    end = end_of(folder)
    steps = end.steps if end is not None else 0
    warmup = warmup_steps(steps, settling)
    ranks: list[Any] = []
    while (path := rank_file(folder, len(ranks))).exists():
        ranks.append(json.loads(path.read_text()))
    windows = [_windows([WindowEnd(*mark) for mark in marks], warmup) for marks, _, _ in ranks]
    first, (marks, costliest, threads) = windows[0], ranks[0]
    known = all(WindowEnd(*mark).samples is not None for mark in marks)
    samples = _median([window.samples or 0 for window in first])  # of the first rank: each counts whole batches
    return Timing(
        steps=steps,
        counted=sum(window.step for window in first),
        windows=tuple(window.seconds for window in first),
        waited=fmean(_median([window.waited for window in of_rank]) for of_rank in windows),
        repeated=_median([window.repeated for window in first]),
        costliest=costliest,
        samples=round(samples) or None if known else None,
        threads=threads,
    )


def _windows(marks: Sequence[WindowEnd], skipped: int) -> list[WindowEnd]:
    """Return the number of steps in each window after the skipped steps, and the other values of one of its steps."""
    windows = []
    for before, after in pairwise(marks):
        if before.step >= skipped:
            steps = after.step - before.step
            values = ((value or 0) - (earlier or 0) for value, earlier in zip(after[1:], before[1:], strict=True))
            windows.append(WindowEnd(steps, *(value / steps for value in values)))
    return windows


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
