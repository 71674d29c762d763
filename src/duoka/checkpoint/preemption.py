"""Being asked to end: a preempted node, or the end of a time slice."""

from __future__ import annotations

import signal
from contextlib import suppress
from types import FrameType
from typing import Any

AGAIN = 75  # the exit code that says "start me again": EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """This run was asked to end, has saved, and ends with exit code 75: start it again, and it goes on."""

    def __init__(self) -> None:
        super().__init__(AGAIN)


class Preemption:
    """Takes note of the signals that ask this process to end. asked: one has come."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """From now on; signals can only be taken in the main thread, and elsewhere this does nothing."""
        with suppress(ValueError):
            for one in SIGNALS:
                self._before.setdefault(one, signal.signal(one, self._note))

    def stop_listening(self) -> None:
        """Let the signals do what they did before."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
