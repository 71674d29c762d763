"""What a script shows of its progress: the lines that it prints, its values, where it is in its loops, the time left.

Values are logged, or printed with a name in at least two lines: `loss 0.5`, `val loss: 0.5`, `acc=91.2%`,
`{'lr': 1e-3}`. Time left is never guessed: it needs the epochs of a `duoka.Checkpoint`, or a bar with a total.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from duoka.supervision.rings import LoggedValue, PrintedLine, ScriptOutput
from duoka.supervision.status_board import Batches, StatusBoard
from duoka.system.messages import duration

KEPT = 20  # lines
MOST_LOGGED = 256  # names that the script gives to a log; further ones are left out
MOST_NAMES = 64  # of numbers in lines
COUNTERS = {"epoch", "epochs", "step", "steps", "iter", "iters", "iteration", "batch"}  # places, not values


_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and movements of the cursor
_WORD = r"[^\W\d][\w./@-]*"
_NAMED = re.compile(
    rf"(?<![\w.])(?P<name>{_WORD}(?: {_WORD}){{0,2}})['\"]?"  # up to three words
    r"(?:\s*[:=\uff1a]\s*|\s+)(?:tensor\()?"
    r"(?P<number>[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan\b|inf\b))"
    r"(?=(?:[%a-zA-Zµ]{1,3})?(?:[\s,;|)\]}/'\"]|[.:]?$|[.:]\s))"  # a unit, and no time, date, version or range
)


def numbers_in(line: str) -> Iterator[tuple[str, float]]:
    """Yield the names and numbers of a line, names as printed; of `9245/10000` the first."""
    for match in _NAMED.finditer(_CODES.sub("", line)):
        yield match["name"], float(match["number"])


class OutputReader:
    """Reads new output."""

    def __init__(self) -> None:
        self.leaves_out = False  # the script logs more names than are kept
        self.lines: deque[str] = deque(maxlen=KEPT)  # the last ones printed, without progress bars
        self.latest: dict[str, float] = {}  # the last number of each value
        self._values = self._lines = 0  # numbers of the last ones read
        self._logged: set[str] = set()  # names of values that the script gives to a log
        self._once: dict[str, LoggedValue] = {}  # printed once so far
        self._printed: set[str] = set()

    def restart(self) -> None:
        """Begin with the board of another attempt."""
        self._values = self._lines = 0

    def read(self, output: ScriptOutput) -> list[LoggedValue]:
        """Return the values since the last call, logged or printed."""
        values = []
        for number, value in output.logged(self._values):
            self._values = number
            if value.name not in self._logged and len(self._logged) == MOST_LOGGED:
                self.leaves_out = True
                continue
            self._logged.add(value.name)
            values.append(value)
        for number, line in output.printed(self._lines):
            self._lines = number
            values += self._of_line(line)
        self.latest |= {value.name: value.value for value in values}
        return values

    def _of_line(self, line: PrintedLine) -> Iterator[LoggedValue]:
        if not line.redrawn:
            self.lines.append(line.text.rpartition("\r")[2])  # what a terminal shows of it in the end
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


@dataclass(frozen=True, slots=True)
class Position:
    """Where a script is. Numbers count from 1; 0: not known."""

    epoch: int = 0  # of `epochs`
    epochs: int = 0
    batch: int = 0  # of `batches`, of the loader read last
    batches: int = 0
    bar: tuple[str, float, float] | None = None  # name, done and total of the outermost progress bar
    left: float | None = None  # seconds until the end of the last epoch, or of the bar

    def words(self) -> str:
        """Describe it: `epoch 3 of 10, batch 120 of 400, about 0:12:30 left`; empty if nothing is known."""
        parts = []
        if self.epochs:
            parts.append(f"epoch {self.epoch} of {self.epochs}")
        if self.bar is not None:
            name, done, total = self.bar
            parts.append(f"{name or 'progress bar'} {done:,.10g} of {total:,.10g}")
        elif self.batch:
            parts.append(f"batch {self.batch:,}" + (f" of {self.batches:,}" if self.batches else ""))
        if self.left is not None:
            which = "" if self.epochs else " of this bar"
            parts.append(f"about {duration(self.left)} left{which}")
        return ", ".join(parts)


def read_position(board: StatusBoard, now: float) -> Position:
    """Read the position of a run's first rank. now: CLOCK_MONOTONIC."""
    loops, batches = board.script_output.loops(), board.batches(board.ranks.start)
    epochs, bars = loops.get("epochs"), loops.get("bars") or []
    position: dict[str, Any] = {"batch": batches.batch, "batches": batches.batches}
    if bars:
        first = bars[0]
        position["bar"] = first["name"], first["done"], first["total"]
        if first["rate"]:
            position["left"] = max(0.0, first["total"] - first["done"]) / first["rate"]
    if epochs:
        left = _left(epochs, batches, now)
        position |= {"epoch": epochs["done"] + 1, "epochs": epochs["count"], "left": left}
    return Position(**position)


def _left(epochs: dict[str, Any], batches: Batches, now: float) -> float | None:
    """Estimate the seconds for the remaining epochs from the mean of those before; None before any progress."""
    within = batches.trained / batches.trained_of if batches.trained_of else 0.0
    done = epochs["done"] - epochs["first"] + min(1.0, within)
    if done <= 0:
        return None
    seconds: float = now - epochs["begun"]
    left: float = seconds / done * (epochs["count"] - epochs["first"] - done)
    return max(0.0, left)
