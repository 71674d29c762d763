"""Clocks of rank 0, whose values it hands to the other ranks of the machine in the order in which it reads them.

Rank 0 writes each value into shared memory and continues; the others take the values in the same order, and wait only
for one that rank 0 has not read yet. So a reading costs some microseconds, while a broadcast lets all ranks wait for
each other.

There are two sequences. Readings of the script are made by all ranks: number n of a rank is number n of rank 0, which
waits before it overwrites one that a rank still needs. Readings of libraries may differ in number: a rank looks for
the next one of the same place, after the same collectives, and takes its own clock if rank 0 has made none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.errors import RanksApart
from duoka.supervision.status_board import StatusSlot
from duoka.system.user_code import user_line

COUNT = 2048  # readings of a sequence that the memory holds
RANKS = 1024
_SEQUENCE = 8 * (1 + RANKS + 2 * COUNT)
SIZE = 2 * _SEQUENCE  # bytes
PATIENCE = 5.0  # seconds that a rank waits for a reading that rank 0 may not make

Wait = Callable[..., bool]  # (rank, is_there, seconds): SharedMemoryExchange._wait


class Readings:
    """This rank's access to the memory, which is empty at first. wait: until another rank has done something."""

    def __init__(self, memory: memoryview, rank: int, world_size: int, wait: Wait) -> None:
        self.rank, self._others, self._wait = rank, range(1, world_size), wait
        self._scripts, self._libraries = (_Sequence(memory[at : at + _SEQUENCE]) for at in (0, _SEQUENCE))
        self._at = 0  # the first of the libraries' readings that this rank may take
        self._missed = -1  # number of collectives after which rank 0 did not come

    def expected(self, slot: StatusSlot, line: int, now: Any) -> Any:
        """Return rank 0's value for a reading that all ranks make.

        Raises:
            RanksApart: rank 0 reads a clock elsewhere, or calls a collective instead.
        """
        sequence, begun = self._scripts, slot.begun
        tag = begun << 32 | line
        if self.rank == 0:
            old = sequence.count - COUNT
            for rank in self._others if old >= 0 else ():
                if sequence.taken[rank] <= old:
                    then = sequence.tags[2 * (old % COUNT)] >> 32
                    slot.begin_wait(f"a clock at {user_line()}")
                    self._wait(rank, lambda: sequence.taken[rank] > old or slot.has_passed(rank, then))  # noqa: B023
                    slot.end_wait()
            sequence.append(tag, now)
            return now
        number = sequence.taken[self.rank]
        if sequence.count <= number:
            slot.begin_wait(f"a clock at {user_line()}")
            self._wait(0, lambda: sequence.count > number or slot.has_passed(0, begun))
            slot.end_wait()
        if sequence.count <= number or sequence.tags[2 * (number % COUNT)] != tag:
            raise RanksApart(
                f"rank {self.rank} reads a clock at {user_line()}, and rank 0 does not after the same collectives"
            )
        value = sequence.value(number, now)
        sequence.taken[self.rank] = number + 1
        return value

    def of_library(self, slot: StatusSlot, line: int, now: Any) -> Any:
        """Return rank 0's value for a reading of a library; `now` if rank 0 does not make it."""
        sequence, begun = self._libraries, slot.begun
        tag = begun << 32 | line
        if self.rank == 0:
            sequence.append(tag, now)
            return now
        if self._missed == begun:
            return now
        looked = self._at

        def look() -> bool:
            nonlocal looked
            passed = slot.has_passed(0, begun)  # read first: what rank 0 has read before is there then
            count = sequence.count
            looked = max(looked, count - COUNT + 1)
            while looked < count:
                if sequence.tags[2 * (looked % COUNT)] == tag:
                    return True
                looked += 1
            return passed

        if not self._wait(0, look, PATIENCE):
            self._missed = begun
        if looked >= sequence.count:
            return now
        value, self._at = sequence.value(looked, now), looked + 1
        return value if sequence.count - looked < COUNT else now  # not overwritten meanwhile


class _Sequence:
    """Values and their tags, written in turn. taken: how many each rank has taken."""

    def __init__(self, memory: memoryview) -> None:
        words = memory.cast("Q")
        self._count, self.taken, self.tags = words[:1], words[1 : 1 + RANKS], words[1 + RANKS :]
        entries = memory[8 * (1 + RANKS) :]
        self._integers: Any = entries.cast("q")
        self._floats: Any = entries.cast("d")

    @property
    def count(self) -> int:
        """Number of readings so far."""
        return self._count[0]

    def append(self, tag: int, value: float) -> None:
        """Write a reading, on rank 0."""
        at = 2 * (self._count[0] % COUNT)
        self.tags[at] = tag
        self._of(value)[at + 1] = value
        self._count[0] += 1

    def value(self, number: int, like: Any) -> Any:
        """Return a value, of the type of `like`."""
        return self._of(like)[2 * (number % COUNT) + 1]

    def _of(self, value: Any) -> Any:
        return self._floats if isinstance(value, float) else self._integers
