"""The last entries that one process writes into shared memory and others read, without locks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

HEAD = 64  # bytes in front of the entries: how many entries there were
ENTRY_HEAD = 16  # bytes of an entry: its number and the length of what follows


class Ring:
    """A ring of entries of bytes, with one writing process. An entry is complete before it counts.

    Threads of the writer may append at the same time: each has its own entry. Readers skip one that is not complete.
    """

    def __init__(self, memory: memoryview, entries: int, entry: int) -> None:
        self._bytes, self._numbers = memory[: size(entries, entry)], memory[: size(entries, entry)].cast("Q")
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
        place = start >> 3
        numbers[place] = 0  # while it is being written
        start += ENTRY_HEAD
        self._bytes[start : start + length] = content
        numbers[place + 1] = length
        numbers[place] = numbers[0] = number

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the number and content of the entries after this number; the oldest may be overwritten already."""
        last = self.last
        for one in range(max(number, last - self._entries) + 1, last + 1):
            start = HEAD + (one % self._entries) * self._entry
            length = min(self._numbers[(start >> 3) + 1], self._entry - ENTRY_HEAD)
            content = bytes(self._bytes[start + ENTRY_HEAD : start + ENTRY_HEAD + length])
            if self._numbers[start >> 3] == one:  # otherwise it has been overwritten meanwhile
                yield one, content


def size(entries: int, entry: int) -> int:
    """Return the bytes that a ring takes. entry: bytes of one, a multiple of 8."""
    return HEAD + entries * entry
