"""What a strategy is: how parameters are kept in step on many devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from duoka.view.collectives import Collectives
from duoka.view.view import View

Observer = Callable[[Callable[[Tensor], bool]], None]  # is told, of a backward pass, which parameters it reached


class Strategy(ABC):
    """Keeps the parameters of all ranks in step. Every call is made by all ranks, in the same order."""

    def view(self, ranks: Collectives, say: Callable[[str], None]) -> View:
        """How this rank sees batches whose parameters are kept in step so."""
        return View(ranks, self.adopt, say)

    @abstractmethod
    def adopt(self, parameter: Tensor) -> None:
        """From now on `parameter` has the same value and the same gradient on every rank. Idempotent."""

    def take_in(self, module: nn.Module) -> None:  # noqa: B027
        """A model is about to be moved to a device."""

    def leave(self, parameter: Tensor) -> None:  # noqa: B027
        """Never adopt `parameter`: torch keeps it in step."""

    @abstractmethod
    def backward(self, site: str) -> AbstractContextManager[None]:
        """Around one backward pass, started at line `site`: when it ends, gradients are the whole batch's."""

    @abstractmethod
    def held(self, parameters: Iterable[Tensor] | None = None) -> AbstractContextManager[None]:
        """Backward passes within leave these parameters' (or all) gradients as they are; the next sees to them."""

    @abstractmethod
    def has_held(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a gradient of these is this rank's own, as it was held."""

    def register_hook(self, leaf: Tensor, hook: Callable[[Tensor], Any], register: Callable[..., Any]) -> Any:
        """Let `hook` see, and change, the whole batch's gradient of a leaf. register: torch's own registering."""
        return register(leaf, hook)

    def give_views(self, parameters: Iterable[Tensor]) -> None:  # noqa: B027
        """The gradients of these may be parts of larger tensors, where that spares a copy."""

    def observe(self, observer: Observer) -> None:  # noqa: B027
        """Where ranks meet in backward passes, `observer` is called at the end of each, on all of them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all parameters."""
