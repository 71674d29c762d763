"""Samples of the ranks of other machines: machine 0's command receives and writes them, other processes read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

from duoka.supervision import ring
from duoka.supervision.ring import Ring

KEPT = 4  # messages of a machine; the newest counts
OF_RANK = 2048  # bytes for each rank in one of them


class MachineSamples(NamedTuple):
    """The newest samples of a machine. received: CLOCK_MONOTONIC of machine 0. ranks: plain data, in their order."""

    received: float
    ranks: Sequence[Any]


class RemoteSamples:
    """A ring for each of machines 1, 2, ..., in memory of `size` bytes. workers: of each of them."""

    def __init__(self, memory: memoryview, workers: Sequence[int]) -> None:
        ends = list(accumulate(map(_size, workers), initial=0))
        self._rings = [
            Ring(memory[begin:end], KEPT, _entry(count))
            for begin, end, count in zip(ends, ends[1:], workers, strict=False)
        ]

    def write(self, machine: int, samples: MachineSamples) -> None:
        """Write the newest samples of a machine."""
        self._rings[machine - 1].append(json.dumps(samples, ensure_ascii=False).encode())

    def read(self, machine: int) -> MachineSamples | None:
        """Return the newest samples of a machine; None if there are none."""
        one = self._rings[machine - 1]
        for _, content in one.since(one.last - 1):
            with suppress(ValueError):  # it was cut
                return MachineSamples(*json.loads(content))
        return None


def size(workers: Sequence[int]) -> int:
    """Return the bytes for machines with so many workers."""
    return sum(map(_size, workers))


def _size(count: int) -> int:
    return ring.size(KEPT, _entry(count))


def _entry(count: int) -> int:
    return 64 + count * OF_RANK
