"""The collectives of a single rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from duoka.collectives.base import Collectives


class OneRank(Collectives):
    """The null object: collectives of one rank, which do nothing."""

    rank, world_size = 0, 1

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        """Do nothing."""
        return lambda: None

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().unsqueeze(0)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor."""
        return tensor

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Return the value."""
        return value
