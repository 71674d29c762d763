"""Events in the stream of an accelerator: the ends of collectives, for the status board, and the time of waits.

A vendor's library returns at once, and only the stream waits for the other ranks. So an event in the stream follows
each collective, and a thread asks which have passed, also while the script waits for the stream in its next line.
The thread ends when all have.
"""

from __future__ import annotations

import _thread  # scripts do not see such a thread, and the interpreter does not join it
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from duoka.supervision.status_board import StatusSlot

PERIOD = 0.5  # seconds


class StreamEnds:
    """Records on `slot` the collectives that the stream has passed."""

    def __init__(self, slot: StatusSlot) -> None:
        self._slot = slot
        self._events: deque[Any] = deque()
        self._is_followed = False
        self._lock = _thread.allocate_lock()  # of both

    def add(self, device: torch.device) -> None:
        """Follow the collective for which the current stream waits since now."""
        with self._lock:
            self._events.append(torch.accelerator.current_stream(device).record_event())
            if not self._is_followed:
                self._is_followed = True
                _thread.start_new_thread(self._follow, ())

    def _follow(self) -> None:
        with suppress(RuntimeError):  # the accelerator has failed, as the script's next call tells
            while self._has_more():
                time.sleep(PERIOD)
                passed = 0
                while self._events and self._events[0].query():
                    self._events.popleft()
                    passed += 1
                self._slot.pass_collectives(passed)

    def _has_more(self) -> bool:
        with self._lock:
            self._is_followed = bool(self._events)
            return self._is_followed


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
