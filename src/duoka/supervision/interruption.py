"""Ctrl-C for several ranks: all raise KeyboardInterrupt before the same collective.

Each rank gets its own signal, at another line of the script than the others. What the script then does (`except
KeyboardInterrupt: torch.save(...)`) would call other collectives on each. So the command process announces the signal
on the status board first, and a rank does not raise at once. It stops before its next collective. If another rank has
begun that one already, it goes on with it; if all ranks have stopped before it, all raise.

A rank that comes to no collective in TO_AGREE seconds raises where it is, as without this.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from duoka.supervision.status_board import StatusBoard

TO_AGREE = 2.0  # seconds
# Waits are counted in short sleeps, so that seconds in which the machine runs no process count as one of them.
PAUSE = 1e-3  # seconds


class Interruption:
    """Ctrl-C in the worker of one rank. Create it in the main thread, before the script runs."""

    def __init__(self, board: StatusBoard, rank: int) -> None:
        self._board, self._rank = board, rank
        self._main = threading.get_ident()
        self._has_raised = self._was_signalled = self._is_late = False

    def install(self) -> None:
        """Take the place of Python's handler of SIGINT, unless there is another one."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.handle)

    def finish(self) -> None:
        """Note that the script has ended, so that a signal that came before raises no KeyboardInterrupt later."""
        self._has_raised |= self._was_signalled

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: the command's first waits for the other ranks; any other raises at once, as by Python."""
        is_late, self._is_late = self._is_late, False
        if self._board.is_interrupted and not self._was_signalled:
            self._was_signalled = True
            if not self._has_raised:
                threading.Thread(target=self._raise_late, daemon=True).start()
        elif not (is_late and self._has_raised):  # while the thread ended, the script did, or all ranks raised
            self._has_raised = self._board.is_interrupted
            raise KeyboardInterrupt

    def _raise_late(self) -> None:
        for _ in range(round(TO_AGREE / PAUSE)):
            time.sleep(PAUSE)
            if self._has_raised:
                return
        self._is_late = True
        signal.pthread_kill(self._main, signal.SIGINT)

    def check(self, number: int) -> None:
        """Stop before collective `number` if there was a Ctrl-C, until another rank begins it.

        Raises:
            KeyboardInterrupt: all ranks have stopped before it.
        """
        if self._has_raised or not self._board.is_interrupted or threading.get_ident() != self._main:
            return
        if signal.getsignal(signal.SIGINT) != self.handle:  # the script's own is called
            return
        pauses = round(2 * TO_AGREE / PAUSE)
        while not self._board.stop_before(self._rank, number):
            # One that has raised may have begun it, too, but all had stopped then.
            if self._board.has_begun(number) or pauses == 0:
                self._board.stop_before(self._rank, 0)
                return
            pauses -= 1
            time.sleep(PAUSE)
        self._has_raised = True
        raise KeyboardInterrupt
