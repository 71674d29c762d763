"""Shares of a batch in proportion to the speed of each device, measured in the steps of a run.

Each rank measures the mean time of its steps without waits for other ranks. After each window of steps all ranks
exchange their times, and each computes the same new weights from them. A rank's time is taken for a fixed part and
one in proportion to its rows; the shares make all ranks take as long.

Why means, and how drift is told from noise: docs/decisions/0133-uneven-shares.md
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from statistics import fmean
from time import monotonic_ns  # a script's `time.monotonic_ns` may be rank 0's
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from duoka.collectives.base import Collectives
from duoka.collectives.streams import StreamWaits
from duoka.hardware import accelerator
from duoka.planning.plan import ratio
from duoka.private.light import not_compiled
from duoka.view.originals import unnumbered
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View

FIRST = 5  # steps before the first window, in which kernels are chosen
WINDOWS = 15, 17, 50  # steps of the first window, of the second, and of each later one
LATE = 3  # steps after the end of a window in which the stream of an accelerator gets there; then the next begins
MEASURED = FIRST + sum(WINDOWS[:2]) + 2 * LATE  # steps until shares are measured

# Times as fast as now, by which other shares must make the steps, and of how many windows in a row.
GAIN = 1.05, 2
CORRECTION = 1.02, 1  # after a change, as only other shares tell a rank's fixed time from that of its rows
DRIFT = 1.10, 2  # once shares have held for a window
LEAST_OF_ROWS = 0.1  # part of a rank's time that is taken to grow with its rows, at least
LEAST = 1e-3  # share of a rank
USABLE = 0.9  # part of a device's free memory that may be used, as some is lost between blocks
CHANGED = 0.02  # of a share, by which it must have changed for a line through two measurements

Point = tuple[Sequence[float], Sequence[float]]  # shares of the ranks (their sum is 1), and their seconds per step


def balanced(points: Sequence[Point], most: Sequence[float] = ()) -> tuple[list[float], float]:
    """Return the shares with which all ranks take as long, and the seconds that a step then takes.

    points: measurements, the newest last; of earlier ones the newest with another share gives a rank's fixed time.
    most: the largest share that each rank's memory holds, together at least 1; empty: all rows.
    """
    limits = most or [1.0] * len(points[-1][0])
    lines = [
        _line([(shares[rank], seconds[rank]) for shares, seconds in points]) for rank in range(len(points[-1][0]))
    ]
    low, high = 0.0, max(fixed + growing for fixed, growing in lines)
    for _ in range(60):
        time = (low + high) / 2
        if sum(_shares(lines, limits, time)) < 1:
            low = time
        else:
            high = time
    return _shares(lines, limits, high), high


def _shares(lines: Sequence[tuple[float, float]], limits: Sequence[float], time: float) -> list[float]:
    """Return the shares that the ranks compute in a time."""
    return [
        min(max(time - fixed, 0.0) / growing, limit) for (fixed, growing), limit in zip(lines, limits, strict=True)
    ]


def _line(measured: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the fixed seconds of a rank, and those that it would take for all rows. measured: shares and seconds."""
    share, seconds = measured[-1]
    growing = seconds / share
    for before, then in reversed(measured[:-1]):
        if abs(share - before) > CHANGED * share:
            slope = (seconds - then) / (share - before)
            growing = min(max(slope, LEAST_OF_ROWS * growing), growing)
            break
    return seconds - growing * share, growing


class Balance:
    """Sets the weights of a view's shares as fast as each rank computes. All ranks make the same steps.

    ranks: the collectives of these ranks. device: of this rank. say: prints a line for the user.
    """

    def __init__(self, view: View, ranks: Collectives, device: torch.device, say: Callable[[str], None]) -> None:
        self._view, self._ranks, self._say = view, ranks, say
        self._main = threading.get_ident()
        self._clock = _ProcessClock(ranks) if device.type == "cpu" else _StreamClock(ranks, device)
        self._steps, self._begin = 0, FIRST  # steps so far, and those before the window
        self._windows = chain(WINDOWS, repeat(WINDOWS[-1]))
        self._window = next(self._windows)
        self._known: list[Point] = []  # measured before the last changes
        self._gained: list[Sequence[float]] = []  # times of the windows in a row that have shown a gain
        self._asked = GAIN
        self._largest = 0.0  # share of this rank so far
        with unnumbered():  # measures the steps
            self.handle = register_optimizer_step_post_hook(
                not_compiled(lambda optimizer, *_: self._stepped(optimizer))
            )

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._ranks.isolated or threading.get_ident() != self._main:
            return
        self._steps += 1
        if self._steps in (self._begin, self._begin + self._window):
            self._clock.mark()
        elif self._steps == self._begin + self._window + LATE:
            self._exchange(self._clock.seconds() / self._window, optimizer)
            self._begin, self._window = self._steps, next(self._windows)
            self._clock.mark()

    def _exchange(self, seconds: float, optimizer: Optimizer) -> None:
        """Exchange the times of a window, and change the weights where that makes steps faster."""
        n = self._view.largest
        if not n:
            return
        partition = self._view.partition(n)
        self._ranks.show_rows(partition.rows, seconds / partition.rows)
        shares = [size / n for size in partition.sizes]
        self._largest = max(self._largest, shares[self._ranks.rank])
        mine = torch.tensor([seconds, self._largest * self._clock.room(optimizer)], dtype=torch.float64)
        times, most = self._ranks.all_gather(mine).view(-1, 2).T.tolist()
        most = list(map(max, most, shares))
        _, time = balanced([*self._known, (shares, times)], most)
        gain, windows = self._asked
        if max(times) <= gain * time:
            self._gained, self._asked = [], DRIFT
            return
        self._gained.append(times)
        if len(self._gained) == windows:
            means = [fmean(measured) for measured in zip(*self._gained, strict=True)]
            self._known = [*self._known[-2:], (shares, means)]
            self._change(balanced(self._known, most)[0], n)
            self._gained, self._asked = [], DRIFT if self._asked is CORRECTION else CORRECTION

    def _change(self, shares: Sequence[float], n: int) -> None:
        least = max(min(shares), LEAST)
        weights = tuple(round(max(share, LEAST) / least, 2) for share in shares)
        before = self._view.partition(n).sizes
        self._view.set_weights(weights)
        if self._view.partition(n).sizes == before:
            return
        sizes = " + ".join(map(str, self._view.partition(n).sizes))
        self._say(f"rows {sizes} of {n} ({ratio(weights, ' : ')}, measured after {self._steps} steps)")


class _ProcessClock:
    """The time between marks without that in which this process waited for other ranks."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks
        self._before, self._last = 0, 0

    def mark(self) -> None:
        self._before, self._last = self._last, monotonic_ns() - self._ranks.waited

    def seconds(self) -> float:
        """Return the seconds between the last two marks."""
        return (self._last - self._before) / 1e9

    def room(self, optimizer: Optimizer) -> float:
        """Return how many times the rows so far this device's memory holds: not known of a process."""
        return math.inf


class _StreamClock:
    """The same for the stream of an accelerator, by events that are read when it has got there."""

    def __init__(self, ranks: Collectives, device: torch.device) -> None:
        self._waits = ranks.stream_waits = StreamWaits(device)
        self._memory = torch.get_device_module(device)
        self._before = self._last = self._waits.mark()
        self._within: list[tuple[Any, Any]] = []

    def mark(self) -> None:
        self._before, self._last, self._within = self._last, self._waits.mark(), self._waits.take()

    def seconds(self) -> float:
        self._last.synchronize()
        waited = sum(begun.elapsed_time(ended) for begun, ended in self._within)
        return float(self._before.elapsed_time(self._last) - waited) / 1e3

    def room(self, optimizer: Optimizer) -> float:
        """Return how many times the rows so far this device's memory holds.

        The optimizer's parameters, their gradients and its states do not grow with the rows; all else is taken to.
        """
        free, _ = self._memory.mem_get_info()
        peak, model = self._memory.max_memory_allocated(), sum(model_bytes([optimizer]))
        fixed = min(model, self._memory.memory_allocated())
        usable = USABLE * (free + self._memory.memory_reserved())
        return float(max(usable - fixed, 0.0) / max(peak - fixed, 1))


def model_bytes(optimizers: Iterable[Optimizer]) -> tuple[int, int, int]:
    """Return the bytes of optimizers' parameters, their gradients, and the optimizers' states."""
    optimizers = list(optimizers)
    parameters = [value for optimizer in optimizers for group in optimizer.param_groups for value in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    entries = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    states = [value for value in entries if isinstance(value, Tensor)]
    return _bytes(parameters), _bytes(gradients), _bytes(states)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors on the accelerator, if there is one in use."""
    kind = accelerator.kind() if accelerator.in_use() else "cpu"
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    local = (tensor.to_local() if isinstance(tensor, BatchTensor) else tensor for tensor in distinct)
    return sum(tensor.nbytes for tensor in local if tensor.device.type == kind)
