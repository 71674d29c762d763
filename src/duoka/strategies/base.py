"""What a strategy is: how parameters are kept in step on many devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor


class Strategy(ABC):
    """Keeps the parameters of all ranks in step. Every call is made by all ranks, in the same order."""

    @abstractmethod
    def adopt(self, parameter: Tensor) -> None:
        """From now on `parameter` has the same value and the same gradient on every rank. Idempotent."""

    @abstractmethod
    def backward(self, site: str) -> AbstractContextManager[None]:
        """Around one backward pass, started at line `site`: when it ends, gradients are the whole batch's."""

    @abstractmethod
    def held(self, parameters: Iterable[Tensor] | None = None) -> AbstractContextManager[None]:
        """Backward passes within leave these parameters' (or all) gradients as they are; the next sees to them."""

    @abstractmethod
    def has_held(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a gradient of these is this rank's own, as it was held."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all parameters."""
