"""The last values that a script has logged, in memory that its worker writes and other processes read."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

RING = 256  # values that are remembered
ENTRY = 128  # bytes of one: its number, step (-1: none), value, length of the name; then the name
NAME = ENTRY - 4 * 8
HEAD = 64  # bytes in front of the entries: how many values there were
SIZE = HEAD + RING * ENTRY
_ENTRY = struct.Struct("=QqdQ")


class LoggedValue(NamedTuple):
    """One value. number: counts from 1. step: None if the script gave none."""

    number: int
    name: str
    step: int | None
    value: float


class ValueRing:
    """A ring of the last `RING` values, with one writer. An entry is complete before it counts."""

    def __init__(self, memory: memoryview) -> None:
        self._bytes, self._count = memory[:SIZE], memory[:8].cast("Q")

    def write(self, step: int | None, values: Mapping[str, object]) -> None:
        """Append the numbers among these values; names are cut to `NAME` bytes."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                number, said = self._count[0] + 1, name.encode()[:NAME]
                start = _start(number)
                _ENTRY.pack_into(self._bytes, start, number, -1 if step is None else step, float(value), len(said))
                self._bytes[start + _ENTRY.size : start + _ENTRY.size + len(said)] = said
                self._count[0] = number

    def since(self, number: int) -> list[LoggedValue]:
        """Return the values after this number; the oldest may be forgotten already."""
        last = self._count[0]
        found = [self._read(one) for one in range(max(number, last - RING) + 1, last + 1)]
        return [one for one in found if one.number > self._count[0] - RING]

    def _read(self, number: int) -> LoggedValue:
        start = _start(number)
        _, step, value, length = _ENTRY.unpack_from(self._bytes, start)
        name = bytes(self._bytes[start + _ENTRY.size : start + _ENTRY.size + min(length, NAME)])
        return LoggedValue(number, name.decode(errors="replace"), None if step < 0 else step, value)


def _start(number: int) -> int:
    return HEAD + (number % RING) * ENTRY
