"""The time for which the stream of an accelerator waits for collectives, by events, which nothing waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class StreamWaits:
    """Pairs of events, before and after each wait of the current stream since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._pairs: list[tuple[Any, Any]] = []

    def mark(self) -> Any:
        """Record an event in the current stream, and return it."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, wait: Callable[[], T]) -> Callable[[], T]:
        """Return a function that calls `wait` between two events."""

        def timed() -> T:
            before = self.mark()
            waited = wait()
            self._pairs.append((before, self.mark()))
            return waited

        return timed

    def take(self) -> list[tuple[Any, Any]]:
        """Return the pairs since the last call."""
        pairs, self._pairs = self._pairs, []
        return pairs
