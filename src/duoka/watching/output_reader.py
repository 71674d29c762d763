"""Read lines that a script prints and values that it logs from its status board, as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from duoka.supervision.rings import LoggedValue, PrintedLine, ScriptOutput
from duoka.watching.numbers import numbers_in

KEPT = 20  # lines
MOST_LOGGED = 256  # names that the script gives to a log; further ones are left out
MOST_NAMES = 64  # of numbers in lines
COUNTERS = {"epoch", "epochs", "step", "steps", "iter", "iters", "iteration", "batch"}  # places, not values


class OutputReader:
    """Reads new output. lines: the last ones printed, without progress bars. latest: the last number of each value.

    leaves_out: the script logs more names than are kept.
    """

    def __init__(self) -> None:
        self.leaves_out = False
        self.lines: deque[str] = deque(maxlen=KEPT)
        self.latest: dict[str, float] = {}
        self._values = self._lines = 0  # numbers of the last ones read
        self._logged: set[str] = set()  # names of values that the script gives to a log
        self._once: dict[str, LoggedValue] = {}  # printed once so far
        self._printed: set[str] = set()

    def restart(self) -> None:
        """Begin with the board of another attempt."""
        self._values = self._lines = 0

    def read(self, output: ScriptOutput) -> list[LoggedValue]:
        """Return the values since the last call, logged or printed."""
        found = []
        for number, value in output.logged(self._values):
            self._values = number
            if value.name not in self._logged and len(self._logged) == MOST_LOGGED:
                self.leaves_out = True
                continue
            self._logged.add(value.name)
            found.append(value)
        for number, line in output.printed(self._lines):
            self._lines = number
            found += self._of_line(line)
        self.latest |= {value.name: value.value for value in found}
        return found

    def _of_line(self, line: PrintedLine) -> Iterator[LoggedValue]:
        if not line.redrawn:
            self.lines.append(line.text.rpartition("\r")[2])
        for name, number in numbers_in(line.text):
            value = LoggedValue(line.time, name, None, number)
            if name in self._logged or name.lower() in COUNTERS:
                continue  # logged: with more digits
            if name in self._printed:
                yield value
            elif name in self._once and len(self._printed) < MOST_NAMES:
                self._printed.add(name)
                yield self._once.pop(name)
                yield value
            elif len(self._once) < MOST_NAMES:
                self._once[name] = value
