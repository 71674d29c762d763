"""A process in which torch.distributed is initialized already, by Ray Train or by the script."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from duoka import engines
from duoka.origins.base import Origin
from duoka.private.torch import store_of_default_group


@dataclass(frozen=True)
class Grouped(Origin):
    """One rank of the default group, whose store duoka shares."""

    @classmethod
    def found(cls) -> Grouped | None:
        torch: Any = sys.modules["torch"]
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        task = engines.find()
        fits = task is not None and task.local is not None and (task.rank, task.count) == (rank, size)
        return cls(rank, size, task.local.rank if task is not None and task.local is not None and fits else 0)

    def store(self, timeout: float) -> Store:
        return PrefixStore("duoka", store_of_default_group())
