"""One rank: nothing to keep in step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from duoka.strategies.base import Strategy


class Single(Strategy):
    """The null object: parameters and gradients of one rank need no communication."""

    def adopt(self, parameter: Tensor) -> None:
        """Do nothing."""

    def backward(self, site: str) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def no_sync(self, parameters: Iterable[Tensor] | None = None) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""
