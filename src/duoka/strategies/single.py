"""One device: nothing to keep in step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from duoka.strategies.base import Strategy


class Single(Strategy):
    """The null object: parameters and gradients of one rank are what they are."""

    def adopt(self, parameter: Tensor) -> None:
        """Nothing to do."""

    def backward(self, site: str) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()
