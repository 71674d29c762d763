"""Measure a script's steps, in every worker: the times at which they end and their costs so far.

The status board counts the steps: those of the optimizer that has made most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from duoka.forecasting.timing import WINDOWS, RankTimes, WindowEnd, warmup_steps, write
from duoka.private.torch import tree_leaves
from duoka.supervision.status_board import StatusSlot
from duoka.trials.observer import StepWatcher, TrialObserver, replace_function, watch_loaders
from duoka.view.tally import Tally


@dataclass(frozen=True)
class Timer(TrialObserver):
    """A trial observer that times the steps of one run. device: type of the devices, such as "cpu"."""

    device: str

    @property
    def window(self) -> int:
        """Number of steps timed together: an asynchronous device is synchronized once per window only."""
        return 1 if self.device == "cpu" else max(1, (self.steps - warmup_steps(self.steps)) // WINDOWS)

    def watch(self, slot: StatusSlot) -> _TimingWatcher:
        return _TimingWatcher(self, slot)


class _TimingWatcher(StepWatcher):
    """Measurements of one rank. samples: None once they cannot be counted."""

    def __init__(self, timer: Timer, slot: StatusSlot) -> None:
        super().__init__(timer.folders.seen, slot.rank)
        self._timer, self._slot = timer, slot
        self._offset = warmup_steps(timer.steps) % timer.window  # a window begins with the first counted step
        self._marks: list[WindowEnd] = []
        self._samples: int | None = 0
        self._own_samples = False
        self._tally = Tally()  # replaced as soon as the view creates one

    def install(self) -> None:
        """Observe batches, work computed whole on every rank, and optimizer steps."""
        watch_loaders(self._count)
        replace_function(Tally, "begin", self._make_begin)
        register_optimizer_step_post_hook(self._after)

    def close(self) -> None:
        costliest = next((f"{name} at {line}" for name, line in self._tally.shares()), "")
        times = RankTimes(self._marks, self._own_samples, costliest, torch.get_num_threads())
        write(self._timer.folders.seen, self._slot.rank, times)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._slot.steps == self.steps:  # another optimizer of the same step
            return
        self.steps = self._slot.steps
        if self.steps % self._timer.window == self._offset and not self.over:
            self._mark()
        if self.steps >= self._timer.steps:
            self.enough()

    def _mark(self) -> None:
        if self._timer.device != "cpu":
            torch.accelerator.synchronize()
        whole = sum(self._tally.seconds.values())
        self._marks.append(WindowEnd(self.steps, perf_counter(), self._slot.waited, whole, self._samples))

    def _count(self, loader: Any, batch: Any, is_local: bool) -> None:
        self._own_samples = self._own_samples or is_local
        found = samples(batch, getattr(loader, "batch_size", None))
        self._samples = None if found is None or self._samples is None else self._samples + found

    def _make_begin(self, original: Callable[[Tally], None]) -> Callable[[Tally], None]:
        def begin(tally: Tally) -> None:
            self._tally = tally
            original(tally)

        return begin


def samples(batch: Any, limit: int | None) -> int | None:
    """Count the samples in a loader's batch: the common first dimension of its tensors, or None if they differ.

    limit: the loader's batch size, or None.
    """
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        return None
    size = int(sizes.pop())
    return size if limit is None or size <= limit else None
