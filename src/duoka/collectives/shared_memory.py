"""All-gather of small CPU tensors between the ranks of one machine, through shared memory.

gloo needs a tenth of a millisecond or more for a number that a script prints, as long as a training step of a small
model; this exchange needs some microseconds. Each rank copies its tensor into a slot of its own, increments its
*arrived* counter, waits until all ranks' counters have reached the same number, and reads all slots in the order of
ranks, so all ranks compute the same bits.

Each rank has RING slots, used in turn. One is overwritten only after every rank has read its previous content, which
each announces by its *left* counter. The counter must become visible after the data, which x86 guarantees; on other
processors gloo is used.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
from collections.abc import Callable
from time import monotonic, sleep  # a script's `time.monotonic` may be rank 0's
from typing import Any

import torch
from torch import Tensor

from duoka.collectives import readings
from duoka.collectives.base import Exchange, PeerFailed
from duoka.collectives.readings import Readings
from duoka.errors import PeerLost, TimedOut
from duoka.supervision.status_board import StatusSlot

SLOT = 1 << 20  # bytes of one tensor at most
LARGE_SLOT = 4 * SLOT  # the same in anonymous memory, which is not limited by the size of /dev/shm
RING = 4  # exchanges in flight
_LINE = 128  # bytes per rank for its counters, so that no two ranks share a cache line
_ARRIVED, _LEFT = 0, 8  # indices of the two counters, in 64-bit words
_FAILED = 2  # first of RING indices, one per slot: the number of the exchange in which the rank sent None
_OVER = 1  # in the first rank's line: not 0 once a rank has ended, so that the others stop waiting
_SPINS = (64, 4096)  # checks without a pause, then checks that yield the processor; then it sleeps


def memory_size(world_size: int, slot: int = SLOT) -> int:
    """Return the bytes of memory to share. The kernel allocates only the pages that are used."""
    return world_size * (_LINE + RING * slot) + readings.SIZE


def give_up(memory: mmap.mmap) -> None:
    """Stop all ranks from waiting, as one has failed. Exchanges that all have joined still succeed."""
    memoryview(memory)[:_LINE].cast("Q")[_OVER] = 1


class SharedMemoryExchange(Exchange):
    """A rank's access to the shared memory. timeout: of an exchange, in seconds."""

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        words = memoryview(memory)[: world_size * _LINE].cast("Q")
        self._counters = [words[at * _LINE // 8 :][: _LINE // 8] for at in range(world_size)]
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=world_size * _LINE)[: -readings.SIZE]
        self._readings = Readings(memoryview(memory)[-readings.SIZE :], rank, world_size, self._wait)
        self._slots = slots.view(world_size, RING, -1)
        # Every rank reads all slots; for many ranks and large tensors gloo's ring is as fast.
        self._most = max(SLOT, min(self._slots.shape[2], 4 * LARGE_SLOT // world_size))
        self._sent = self._left = 0
        self._finished: set[int] = set()  # later than the first that is not
        self._waits: dict[int, Callable[[], None]] = {}  # of exchanges that are not finished

    def accepts(self, tensor: Tensor) -> bool:
        """Return True if a tensor is small enough and a slot is free: equal on all ranks."""
        return (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and 0 < tensor.numel() * tensor.itemsize <= self._most
            and self._make_room()
        )

    def _make_room(self) -> bool:
        """Make room for a slot if possible; return True if one is free.

        An exchange for which this rank does not wait yet is finished early if it blocks the slots of later ones:
        since a later one is finished, all ranks have sent their tensors for it.
        """
        if self._sent - self._left == RING and self._finished:
            self._waits[self._left + 1]()
        return self._sent - self._left < RING

    def start(
        self, tensor: Tensor | None, receive: Callable[[list[Tensor]], Any], text: bytes = b""
    ) -> Callable[[], None]:
        """Send `tensor`, and return a function that waits for the others and calls `receive` with all ranks' tensors.

        These are flattened views of the shared memory, valid until `receive` returns. The function raises PeerFailed
        if any rank sent None.
        """
        number = self._sent = self._sent + 1
        self._until(_LEFT, number - RING)
        size = 0 if tensor is None else tensor.numel() * tensor.itemsize
        failed = _FAILED + number % RING
        rows = self._slots[:, number % RING, :size].unbind()
        if tensor is None:
            self._counters[self.rank][failed] = number
        else:
            rows[self.rank].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
        self._counters[self.rank][_ARRIVED] = number

        def wait() -> None:
            if self._waits.pop(number, None) is None:  # finished early
                return
            self._until(_ARRIVED, number)
            if tensor is None or any(counters[failed] == number for counters in self._counters):
                self._leave(number)
                raise PeerFailed
            receive([row.view(tensor.dtype) for row in rows])
            self._leave(number)

        self._waits[number] = wait
        return wait

    def _leave(self, number: int) -> None:
        self._finished.add(number)
        while self._left + 1 in self._finished:
            self._left += 1
            self._finished.remove(self._left)
        self._counters[self.rank][_LEFT] = self._left

    def _until(self, counter: int, number: int) -> None:
        """Wait until a counter of every rank has reached `number`.

        Raises:
            PeerLost: a rank has ended.
            TimedOut: a rank did not arrive.
        """
        for rank, counters in enumerate(self._counters):
            if counters[counter] < number:
                self._wait(rank, lambda: counters[counter] >= number)  # noqa: B023 (called at once)

    def _wait(self, rank: int, is_there: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait for something that `rank` does; returns False if it has not done it after so many seconds.

        Raises:
            PeerLost: a rank has ended.
            TimedOut: the exchange's own limit is over.
        """
        looks, deadline = 0, 0.0
        while not is_there():
            looks += 1
            if looks <= _SPINS[0]:
                continue
            if looks <= _SPINS[1]:
                os.sched_yield()
                continue
            sleep(1e-4)
            if self._counters[0][_OVER] and not is_there():
                raise PeerLost(f"rank {self.rank} lost another rank while it waited for rank {rank}")
            now = monotonic()
            deadline = deadline or now + min(seconds, self.timeout)
            if now > deadline:
                if seconds < self.timeout:
                    return False
                raise TimedOut(f"rank {self.rank} waited {self.timeout:.0f} s for rank {rank}")
        return True

    def meet(self, slot: StatusSlot, digest: int, text: str) -> bool:
        """Return whether all ranks are at the same operation, which is no collective yet."""
        is_here = slot.meet(digest)
        slot.begin_wait(text)
        try:
            for rank in range(len(self._counters)):
                if rank != self.rank:
                    self._wait(rank, lambda: is_here(rank) is not None)  # noqa: B023 (called at once)
                    if not is_here(rank):
                        return False
            return True
        finally:
            slot.end_wait()

    def reading(self, slot: StatusSlot, line: int, now: Any, expected: bool) -> Any:
        """Return rank 0's value of a clock."""
        return self._readings.expected(slot, line, now) if expected else self._readings.of_library(slot, line, now)


def is_possible() -> bool:
    """Return True if this machine's processors make writes visible in order (x86)."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "sched_yield")
