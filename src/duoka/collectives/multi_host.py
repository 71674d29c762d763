"""Collectives of ranks that share no memory, usually on several machines.

On one machine each rank compares the name of its collective with those on the status board. Between machines, small
tensors carry the name (`direct.py`), but tensors sent by torch do not: two different collectives of the same
size would be added up. So the ranks compare a checksum of the names of all collectives, at every barrier and every
EVERY collectives.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.distributed import ReduceOp

from duoka.collectives.process import ProcessCollectives
from duoka.errors import RanksApart
from duoka.system.user_code import user_line

EVERY = 1024  # collectives
MIN: Any = ReduceOp.MIN


class MultiHostCollectives(ProcessCollectives):
    """As ProcessCollectives, with comparisons of checksums."""

    _count = _checksum = 0  # of the names of collectives so far

    def _enter(self, text: bytes, shown: str) -> None:
        super()._enter(text, shown)
        self._count += 1
        self._checksum = zlib.crc32(text, self._checksum)
        if self._count % EVERY == 0:
            self._compare()

    def barrier(self) -> None:
        super().barrier()
        self._compare()

    def _compare(self) -> None:
        """Compare the checksums, in one more collective.

        Raises:
            RanksApart: the ranks have not called the same collectives.
        """
        least_and_most = torch.tensor([self._checksum, -self._checksum], device="cpu")
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = MIN
        group = self._group("cpu")
        self._call_torch(lambda: group.allreduce([least_and_most], options).wait())
        least, most = least_and_most.tolist()
        if least != -most:
            raise RanksApart(
                f"the ranks of different machines called different collectives, somewhere before {user_line()}: they "
                "added up tensors that do not belong together"
            )
