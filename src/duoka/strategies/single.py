"""One device: nothing to keep in step."""

from __future__ import annotations

from collections.abc import Iterable
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

    def held(self, parameters: Iterable[Tensor] | None = None) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def has_held(self, parameters: Iterable[Tensor]) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Nothing to do."""
