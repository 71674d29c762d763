"""torch.distributed is initialized in this process already: by Ray Train, or by the script."""

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
    """One rank of the default group, whose store is there for others, too."""

    @classmethod
    def found(cls) -> Grouped | None:
        torch: Any = sys.modules["torch"]
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        part = engines.found()
        fits = part is not None and part.local is not None and (part.rank, part.count) == (rank, size)
        return cls(rank, size, part.local.rank if part is not None and part.local is not None and fits else 0)

    def store(self, timeout: float) -> Store:
        return PrefixStore("duoka", store_of_default_group())
