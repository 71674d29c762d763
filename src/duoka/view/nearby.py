"""CPU tensors between the ranks of one machine, through memory that they share.

A number that the script prints costs one exchange, and gloo's takes a tenth of a millisecond and more: as long as
a training step of a small model. Here a rank copies its tensor into a slot of its own, raises its counter, waits
until all counters have come as far, and reads the others' slots: some microseconds. Every rank combines the slots
in the order of ranks, so all have the same bits.

Slots are used in turn. One is written again only when every rank has left its last use, which each tells by a
second counter. That a counter is seen after what it announces is so on x86; elsewhere gloo is used.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duoka.errors import PeerLost, TimedOut
from duoka.view.collectives import Failed

SLOT = 1 << 20  # bytes of one tensor at most
LARGE_SLOT = 4 * SLOT  # the same in memory that is no file of /dev/shm, which may be a small one
RING = 4  # exchanges on their way at a time
_LINE = 128  # bytes between two ranks' counters, so that they share no cache line
_CAME, _LEFT = 0, 8  # places of the two counters, in 64-bit words
_FAILED = 2  # the first of RING places, by slot: the exchange for which its rank had nothing to send
_OVER = 1  # in the first rank's line: not 0 once a rank has failed, for whom nobody needs to wait
_PATIENCE = (64, 4096)  # looks without a pause, then looks that yield the processor; after that it sleeps


def memory_size(world_size: int, slot: int = SLOT) -> int:
    """Bytes that the ranks share; the kernel gives pages only to what is used."""
    return world_size * (_LINE + RING * slot)


def give_up(memory: mmap.mmap) -> None:
    """Let no rank wait any longer: another has failed. What all have come to already still ends well."""
    memoryview(memory)[:_LINE].cast("Q")[_OVER] = 1


class Nearby:
    """This rank's end of the shared memory.

    timeout: seconds that an exchange may wait.
    """

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        words = memoryview(memory)[: world_size * _LINE].cast("Q")
        self._counters = [words[at * _LINE // 8 :][: _LINE // 8] for at in range(world_size)]
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=world_size * _LINE)
        self._slots = slots.view(world_size, RING, -1)
        # Every rank reads all slots: for many and large ones gloo's ring, which reads two, is as quick.
        self._most = max(SLOT, min(self._slots.shape[2], 4 * LARGE_SLOT // world_size))
        self._sent = self._left = 0
        self._finished: set[int] = set()

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor may go this way: all ranks say the same, since they are at the same place."""
        return (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and 0 < tensor.numel() * tensor.itemsize <= self._most
            and self._sent - self._left < RING
        )

    def start(
        self, tensor: Tensor | None, take: Callable[[list[Tensor]], Any], text: bytes = b""
    ) -> Callable[[], None]:
        """Send `tensor`; the function returned waits for the others and hands all ranks' tensors (flat) to `take`.

        They are views of the shared memory: `take` copies what it keeps. Where any rank sent None it raises Failed.
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
        self._counters[self.rank][_CAME] = number

        def wait() -> None:
            self._until(_CAME, number)
            if tensor is None or any(counters[failed] == number for counters in self._counters):
                self._leave(number)
                raise Failed
            take([row.view(tensor.dtype) for row in rows])
            self._leave(number)

        return wait

    def _leave(self, number: int) -> None:
        self._finished.add(number)
        while self._left + 1 in self._finished:
            self._left += 1
            self._finished.remove(self._left)
        self._counters[self.rank][_LEFT] = self._left

    def _until(self, place: int, number: int) -> None:
        """Wait until every rank's counter has come to `number`."""
        looks, deadline = 0, 0.0
        for counters in self._counters:
            while counters[place] < number:
                looks += 1
                if looks <= _PATIENCE[0]:
                    continue
                if looks <= _PATIENCE[1]:
                    os.sched_yield()
                    continue
                time.sleep(1e-4)
                if self._counters[0][_OVER] and counters[place] < number:
                    raise PeerLost(f"rank {self.rank} lost another rank while it waited for it")
                now = time.monotonic()
                deadline = deadline or now + self.timeout
                if now > deadline:
                    raise TimedOut(f"rank {self.rank} waited {self.timeout:.0f} s for another rank in vain")


def is_possible() -> bool:
    """Whether this machine's processors show writes in the order in which they were made."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "sched_yield")
