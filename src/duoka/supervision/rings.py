"""Rings of entries in shared memory, which one process writes and others read without locks.

Of the script: the values that it logs, the lines that it prints, its loops and progress bars. Of other machines: the
samples of their ranks. Times are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, count
from typing import Any, NamedTuple

HEAD = 64  # bytes in front of the entries: how many entries there were
ENTRY_HEAD = 16  # bytes of an entry: its number and the length of what follows


class Ring:
    """A ring of entries of bytes, with one writing process. An entry is complete before it counts.

    Threads of the writer may append at the same time: each has its own entry. Readers skip one that is not complete.
    """

    def __init__(self, memory: memoryview, entries: int, entry: int) -> None:
        self._bytes = memory[: ring_size(entries, entry)]
        self._numbers = self._bytes.cast("Q")
        self._entries, self._entry = entries, entry
        self._next: Iterator[int] | None = None

    @property
    def last(self) -> int:
        """Number of the newest entry, counted from 1; 0 before the first."""
        return self._numbers[0]

    def append(self, content: bytes) -> None:
        """Append an entry; what is longer than an entry is cut."""
        if self._next is None:
            self._next = count(self.last + 1)
        number, length, numbers = next(self._next), len(content), self._numbers
        if length > self._entry - ENTRY_HEAD:
            length = self._entry - ENTRY_HEAD
            content = content[:length]
        start = HEAD + (number % self._entries) * self._entry
        word = start >> 3
        numbers[word] = 0  # while it is being written: no number of an entry
        start += ENTRY_HEAD
        self._bytes[start : start + length] = content
        numbers[word + 1] = length
        numbers[word] = numbers[0] = number  # last, as readers take the entry for complete when it has its number

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the number and content of the entries after this number; the oldest may be overwritten already."""
        last = self.last
        for entry in range(max(number, last - self._entries) + 1, last + 1):
            start = HEAD + (entry % self._entries) * self._entry
            length = min(self._numbers[(start >> 3) + 1], self._entry - ENTRY_HEAD)
            content = bytes(self._bytes[start + ENTRY_HEAD : start + ENTRY_HEAD + length])
            if self._numbers[start >> 3] == entry:  # otherwise it has been overwritten meanwhile
                yield entry, content

    def append_json(self, data: object) -> None:
        self.append(json.dumps(data, ensure_ascii=False).encode())

    def newest_json(self) -> Any:
        """Return the data of the newest entry; None if there is none."""
        for _, content in self.since(self.last - 1):
            with suppress(ValueError):  # it was cut
                return json.loads(content)
        return None


def ring_size(entries: int, entry: int) -> int:
    """Return the bytes that a ring takes. entry: bytes of one, a multiple of 8."""
    return HEAD + entries * entry


VALUES, VALUE = 256, 128  # number of values, bytes of one
LINES, LINE = 256, 256
LOOPS, LOOP = 8, 1024  # the newest of them counts
OUTPUT_SIZE = ring_size(VALUES, VALUE) + ring_size(LINES, LINE) + ring_size(LOOPS, LOOP)
_VALUE = struct.Struct("=qqd")  # time, step (-1: none), value; then the name
_LINE = struct.Struct("=q?")  # time, redrawn; then the text
NAME = VALUE - ENTRY_HEAD - _VALUE.size  # bytes of a name
TEXT = LINE - ENTRY_HEAD - _LINE.size  # bytes of a line


class LoggedValue(NamedTuple):
    """One value."""

    time: float  # seconds
    name: str
    step: int | None  # None: the script gave none
    value: float


class PrintedLine(NamedTuple):
    """One line."""

    time: float  # seconds
    text: str
    redrawn: bool  # by the next one, as a progress bar is


class ScriptOutput:
    """What rank 0's script shows of itself, in memory of `OUTPUT_SIZE` bytes."""

    def __init__(self, memory: memoryview) -> None:
        lines, loops = ring_size(VALUES, VALUE), ring_size(VALUES, VALUE) + ring_size(LINES, LINE)
        self.values = Ring(memory, VALUES, VALUE)
        self.lines = Ring(memory[lines:], LINES, LINE)
        self._loops = Ring(memory[loops:], LOOPS, LOOP)

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

    def show_loops(self, loops: Mapping[str, Any]) -> None:
        """Write where the script is in its loops and progress bars, for `loops`."""
        self._loops.append_json(loops)

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

    def loops(self) -> dict[str, Any]:
        """Return where the script is; empty if that is not known."""
        return self._loops.newest_json() or {}


KEPT = 4  # messages of a machine; the newest counts
OF_RANK = 2048  # bytes for each rank in one of them


class MachineSamples(NamedTuple):
    """The newest samples of a machine."""

    received: float  # CLOCK_MONOTONIC of machine 0
    ranks: Sequence[Any]  # plain data, in their order


class RemoteSamples:
    """A ring for each of machines 1, 2, ..., in memory of `samples_size` bytes. workers: of each of them."""

    def __init__(self, memory: memoryview, workers: Sequence[int]) -> None:
        starts = accumulate((samples_size([count]) for count in workers), initial=0)
        self._rings = [
            Ring(memory[start:], KEPT, _message(count)) for start, count in zip(starts, workers, strict=False)
        ]

    def write(self, machine: int, samples: MachineSamples) -> None:
        """Write the newest samples of a machine."""
        self._rings[machine - 1].append_json(samples)

    def read(self, machine: int) -> MachineSamples | None:
        """Return the newest samples of a machine; None if there are none."""
        samples = self._rings[machine - 1].newest_json()
        return None if samples is None else MachineSamples(*samples)


def samples_size(workers: Sequence[int]) -> int:
    """Return the bytes for machines with so many workers."""
    return sum(ring_size(KEPT, _message(count)) for count in workers)


def _message(ranks: int) -> int:
    return 64 + ranks * OF_RANK
