"""Output of rank 0's script for `duoka watch` and reports: logged values, printed lines, loops and progress bars.

All are rings in memory that its worker writes and other processes read. Times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from duoka.supervision import ring
from duoka.supervision.ring import ENTRY_HEAD, Ring

VALUES, VALUE = 256, 128  # number of values, bytes of one
LINES, LINE = 256, 256
LEVELS, LEVEL = 8, 1024  # the newest of them counts
SIZE = ring.size(VALUES, VALUE) + ring.size(LINES, LINE) + ring.size(LEVELS, LEVEL)
_VALUE = struct.Struct("=qqd")  # time, step (-1: none), value; then the name
_LINE = struct.Struct("=q?")  # time, redrawn; then the text
NAME = VALUE - ENTRY_HEAD - _VALUE.size  # bytes of a name
TEXT = LINE - ENTRY_HEAD - _LINE.size  # bytes of a line


class LoggedValue(NamedTuple):
    """One value. time: seconds. step: None if the script gave none."""

    time: float
    name: str
    step: int | None
    value: float


class PrintedLine(NamedTuple):
    """One line. time: seconds. redrawn: by the next one, as a progress bar is."""

    time: float
    text: str
    redrawn: bool


class ScriptOutput:
    """The three rings, in memory of `SIZE` bytes."""

    def __init__(self, memory: memoryview) -> None:
        lines, levels = ring.size(VALUES, VALUE), ring.size(VALUES, VALUE) + ring.size(LINES, LINE)
        self.values = Ring(memory[:lines], VALUES, VALUE)
        self.lines = Ring(memory[lines:levels], LINES, LINE)
        self.levels = Ring(memory[levels:SIZE], LEVELS, LEVEL)

    def log(self, step: int | None, values: Mapping[str, object]) -> None:
        """Write the numbers among these values; names are cut to `NAME` bytes."""
        now = time.monotonic_ns()
        for name, value in values.items():
            if isinstance(value, (int, float)):
                head = _VALUE.pack(now, -1 if step is None else step, float(value))
                self.values.append(head + name.encode(errors="replace"))

    def print(self, text: str, redrawn: bool) -> None:
        """Write a line; it is cut to `TEXT` bytes."""
        self.lines.append(_LINE.pack(time.monotonic_ns(), redrawn) + text[:TEXT].encode(errors="replace"))

    def place(self, levels: Mapping[str, Any]) -> None:
        """Write the script's position in its loops and progress bars, which `placed` reads."""
        self.levels.append(json.dumps(levels).encode())

    def logged(self, after: int) -> Iterator[tuple[int, LoggedValue]]:
        """Yield the values after this number, with their numbers."""
        for number, content in self.values.since(after):
            when, step, value = _VALUE.unpack_from(content)
            name = content[_VALUE.size :].decode(errors="replace")
            yield number, LoggedValue(when / 1e9, name, None if step < 0 else step, value)

    def printed(self, after: int) -> Iterator[tuple[int, PrintedLine]]:
        """Yield the lines after this number, with their numbers."""
        for number, content in self.lines.since(after):
            when, redrawn = _LINE.unpack_from(content)
            yield number, PrintedLine(when / 1e9, content[_LINE.size :].decode(errors="replace"), redrawn)

    def placed(self) -> dict[str, Any]:
        """Return the newest place; empty if there is none."""
        for _, content in self.levels.since(self.levels.last - 1):
            with suppress(ValueError):  # it was cut
                found: dict[str, Any] = json.loads(content)
                return found
        return {}
