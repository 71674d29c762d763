"""Models whose outputs identify their items, and models that fail on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import nn


class Double(nn.Module):
    """Returns twice each item, [n] -> [n]; its one weight is 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Slow(Double):
    """Takes a time that is independent of the order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004 * (int(x[0]) * 7919 % 5))
        return super().forward(x)


class Failing(Double):
    """Raises `error()` for batches for which `when(x)` is true."""

    def __init__(self, when: Callable[[torch.Tensor], bool], error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.when, self.error = when, error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when(x):
            raise self.error()
        return super().forward(x)


class Mortal(Double):
    """Raises a device error on the first batch in each of a number of threads."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.state = Mortality(failures)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.live()
        return super().forward(x)


class Mortality:
    """The number of failures left, shared by all copies of a model."""

    def __init__(self, failures: int) -> None:
        self.left, self.lock = failures, threading.Lock()

    def __deepcopy__(self, memo: object) -> Mortality:
        return self

    def live(self) -> None:
        time.sleep(0.002)
        with self.lock:
            if self.left:
                self.left -= 1
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
