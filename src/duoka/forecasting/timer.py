"""Beside the script, in every worker: when its steps end, and what they have cost so far.

A step is what the board counts as one: of the optimizer that has made most.
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

from duoka.board import Seat
from duoka.forecasting.timing import WINDOWS, Mark, Seen, settled, write
from duoka.private.torch import tree_leaves
from duoka.trials.accompany import Companion, Watch, replace_function
from duoka.trials.loaders import watch_loaders
from duoka.view.tally import Tally


@dataclass(frozen=True)
class Timer(Companion):
    """Times the steps of one run. device: the type of what it runs on."""

    device: str

    @property
    def window(self) -> int:
        """How many steps are timed together: a device that works on its own is not waited for at each."""
        return 1 if self.device == "cpu" else max(1, (self.steps - settled(self.steps)) // WINDOWS)

    def watch(self, seat: Seat) -> _Watch:
        return _Watch(self, seat)


class _Watch(Watch):
    """What one rank has seen so far. samples: None once they cannot be counted."""

    def __init__(self, timer: Timer, seat: Seat) -> None:
        super().__init__(timer.places.seen, seat.rank)
        self._timer, self._seat = timer, seat
        self._offset = settled(timer.steps) % timer.window  # so that a window begins with the first step that counts
        self._marks: list[Mark] = []
        self._samples: int | None = 0
        self._own_samples = False
        self._tally = Tally()  # until there is one

    def install(self) -> None:
        """Look at batches, at what is computed whole, and at steps."""
        watch_loaders(self._count)
        replace_function(Tally, "begin", self._make_begin)
        register_optimizer_step_post_hook(self._after)

    def close(self) -> None:
        costliest = next((f"{name} at {line}" for name, line in self._tally.shares()), "")
        seen = Seen(self._marks, self._own_samples, costliest, torch.get_num_threads())
        write(self._timer.places.seen, self._seat.rank, seen)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._seat.steps == self.steps:  # another optimizer of the same step
            return
        self.steps = self._seat.steps
        if self.steps % self._timer.window == self._offset and not self.over:
            self._mark()
        if self.steps >= self._timer.steps:
            self.enough()

    def _mark(self) -> None:
        if self._timer.device != "cpu":
            torch.accelerator.synchronize()
        whole = sum(self._tally.seconds.values())
        self._marks.append(Mark(self.steps, perf_counter(), self._seat.waited, whole, self._samples))

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
    """How many samples are in a loader's batch: what all its tensors agree on; None where that cannot be told.

    limit: the loader's batch size, if it has one.
    """
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        return None
    size = int(sizes.pop())
    return size if limit is None or size <= limit else None
