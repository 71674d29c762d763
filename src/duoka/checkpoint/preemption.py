"""Handle signals that ask a run to end, as of a preempted node or the end of a time slice."""

from __future__ import annotations

import signal
from contextlib import suppress
from types import FrameType
from typing import Any

AGAIN = 75  # exit code for "start me again": EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """This run was asked to end and has saved. Exit code 75; when started again, the run continues."""

    def __init__(self) -> None:
        super().__init__(AGAIN)


class Preemption:
    """Records the signals that ask this process to end. asked: True after one has arrived."""

    def __init__(self) -> None:
        self.asked = False
        self._is_ending = False
        self._first: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install the handlers; does nothing outside of the main thread."""
        with suppress(ValueError):
            for number in SIGNALS:
                self._before.setdefault(number, signal.signal(number, self._note))

    def exception(self) -> Preempted:
        """Return the exception to raise after saving. Further signals then no longer interrupt the exit."""
        self._is_ending = True
        return Preempted()

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        while self._before:
            number, before = self._before.popitem()
            if not (self._is_ending and before is signal.SIG_DFL):
                signal.signal(number, before)

    def end(self) -> None:
        """Restore the previous handlers after the loop has ended, and raise again a signal that came too late."""
        self.uninstall()
        if self._first is not None and not self._is_ending:
            number, self._first, self.asked = self._first, None, False
            signal.raise_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._first = self._first or number
        self.asked = True
