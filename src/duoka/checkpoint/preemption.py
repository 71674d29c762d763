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
        self._answered = False
        self._first: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """From now on; signals can only be taken in the main thread, and elsewhere this does nothing."""
        with suppress(ValueError):
            for one in SIGNALS:
                self._before.setdefault(one, signal.signal(one, self._note))

    def answer(self) -> Preempted:
        """What to raise when all is saved. From then on no further signal cuts the end of this process short."""
        self._answered = True
        return Preempted()

    def stop_listening(self) -> None:
        """Let the signals do what they did before."""
        while self._before:
            number, before = self._before.popitem()
            if not (self._answered and before is signal.SIG_DFL):
                signal.signal(number, before)

    def give_back(self) -> None:
        """The loop has ended by itself: a signal that came too late for it is for what follows it."""
        self.stop_listening()
        if self._first is not None and not self._answered:
            number, self._first, self.asked = self._first, None, False
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._first = self._first or number
        self.asked = True
