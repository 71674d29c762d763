"""Collectives between machines.

On one machine a board shows what every rank came to, and each looks whether it is the same. Between machines a small
tensor says so itself (direct.py). Nothing does for what gloo and NCCL carry: two collectives of the same size that do
not belong together would be added up. So the ranks compare, now and then and at every barrier, a checksum of all that
they came to.
"""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp, Store  # type: ignore[attr-defined]

from duoka.errors import RanksApart
from duoka.view.collectives import CollectiveSlot, Exchange, ProcessCollectives
from duoka.view.site import user_line

EVERY = 1024  # collectives
MIN: Any = ReduceOp.MIN


class FarCollectives(ProcessCollectives):
    """Collectives of ranks on several machines, or of such as share no memory."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        slot: CollectiveSlot,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(store, rank, world_size, timeout, slot, exchange)
        self._came, self._checksum = 0, 0

    def _enter(self, text: bytes, told: str) -> None:
        super()._enter(text, told)
        self._came += 1
        self._checksum = zlib.crc32(text, self._checksum)
        if self._came % EVERY == 0:
            self._compare()

    def barrier(self) -> None:
        super().barrier()
        self._compare()

    def _compare(self) -> None:
        """Come to one more collective, of which nobody is told.

        Raises:
            RanksApart: the ranks have not called the same collectives.
        """
        least_and_most = torch.tensor([self._checksum, -self._checksum], device="cpu")
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = MIN
        group = self._group("cpu")
        self._met(lambda: group.allreduce([least_and_most], options).wait())
        least, most = least_and_most.tolist()
        if least != -most:
            raise RanksApart(
                f"the ranks of different machines called different collectives, somewhere before {user_line()}: "
                "what they added up did not belong together"
            )
