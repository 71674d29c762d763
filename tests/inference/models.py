"""Models whose outputs tell which item they belong to, and that fail when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import nn


class Double(nn.Module):
    """Gives twice each item, [n] -> [n]; its one weight is 2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Slow(Double):
    """Takes a time that has nothing to do with the order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004 * (int(x[0]) * 7919 % 5))
        return super().forward(x)


class Failing(Double):
    """Raises `error()` for batches for which `when(x)` holds."""

    def __init__(self, when: Callable[[torch.Tensor], bool], error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.when, self.error = when, error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when(x):
            raise self.error()
        return super().forward(x)


class Mortal(Double):
    """Its device dies on the first batch that a certain number of threads come with."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.state = Mortality(failures)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.live()
        return super().forward(x)


class Mortality:
    """Shared by all copies of a model."""

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
