"""Signals that the command process handles while it has workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MEANT_FOR_SCRIPTS = (signal.SIGUSR1, signal.SIGUSR2)  # schedulers send them to the process that they started


class Signals:
    """Convert signals to bytes readable from `fd`, so that one select call waits for everything.

    stops: received requests to end, in order. for_scripts: received signals meant for the scripts.
    """

    def __init__(self) -> None:
        self.stops: list[signal.Signals] = []
        self.for_scripts: list[signal.Signals] = []
        self.fd, self._inlet = os.pipe()
        for end in (self.fd, self._inlet):
            os.set_blocking(end, False)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        self._wakeup_before = signal.set_wakeup_fd(self._inlet, warn_on_full_buffer=False)
        for one in (signal.SIGCHLD, *STOPS):
            # A process started with a signal ignored (nohup, a background job) goes on to ignore it.
            if one is signal.SIGCHLD or signal.getsignal(one) is not signal.SIG_IGN:
                self._before[one] = signal.signal(one, _nothing)
        for one in MEANT_FOR_SCRIPTS:
            if signal.getsignal(one) is signal.SIG_DFL:  # the default would end this process and its workers
                self._before[one] = signal.signal(one, _nothing)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the previous handlers; also called in workers."""
        if not self._before:
            return
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before.clear()
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._inlet)

    @property
    def interrupts(self) -> int:
        """Number of SIGINTs received."""
        return self.stops.count(signal.SIGINT)

    def read(self) -> None:
        """Read the signals that have arrived."""
        with suppress(BlockingIOError):
            while received := os.read(self.fd, 4096):
                taken = [signal.Signals(number) for number in received if number in self._before]
                self.stops += [one for one in taken if one in STOPS]
                self.for_scripts += [one for one in taken if one in MEANT_FOR_SCRIPTS]


@contextmanager
def blocked() -> Iterator[None]:
    """Block all signals within: a worker must not handle one meant for its parent during the fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def name(number: int) -> str:
    """Return `SIGKILL` for 9; `signal 40` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python has written the signal's byte to the wakeup descriptor already."""
