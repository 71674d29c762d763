"""The ranks that load, save and restore together: of duoka's collectives, or of a script's torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from duoka.collectives.base import OneRank
from duoka.errors import CheckpointError, DuokaError, WeightsError

Outcome = TypeVar("Outcome")


class Ranks(Protocol):
    """The collectives needed. Every call is made by all ranks, in the same order."""

    rank: int
    world_size: int

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor`, (world_size, *tensor.shape). A CPU tensor of the same shape on all ranks."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Return rank `source`'s `value`."""


class GroupRanks:
    """The ranks of torch.distributed's default group, for scripts that call it themselves."""

    def __init__(self) -> None:
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def all_gather(self, tensor: Tensor) -> Tensor:
        every: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(every, tensor)
        return torch.stack(every)

    def broadcast_object(self, value: Any, source: int) -> Any:
        values = [value]
        torch.distributed.broadcast_object_list(values, source)
        return values[0]


def ranks_here() -> Ranks:
    """Return the ranks of torch.distributed if it is initialized, else one rank."""
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    return GroupRanks() if joined else OneRank()


def on_first(ranks: Ranks, act: Callable[[], Outcome]) -> Outcome:
    """Call `act` on rank 0 alone; every rank returns its result, or raises its error."""
    outcome: Any = None
    failure: BaseException | None = None
    if ranks.rank == 0:
        try:
            outcome = act()
        except Exception as error:
            failure = error
    try:
        portable = failure  # other ranks can unpickle it
        if failure is not None and not isinstance(failure, (CheckpointError, WeightsError)):
            portable = DuokaError(f"on rank 0: {failure!r}")
        outcome, remote = ranks.broadcast_object((outcome, portable), 0)
        if failure or remote:
            raise failure or remote
        return outcome  # type: ignore[no-any-return]
    finally:
        failure = remote = portable = None  # break the reference cycle of the error and this frame


def together(ranks: Ranks, act: Callable[[], Outcome], what: str, kind: type[DuokaError]) -> Outcome:
    """Call `act` on every rank. If one fails, it raises its own error, and the others one that names its rank."""
    outcome: Any = None
    failure: Exception | None = None
    try:
        outcome = act()
    except Exception as error:
        failure = error
    try:
        # Every rank comes here, whether it failed or not: none waits for one that has raised.
        failed = ranks.all_gather(torch.tensor(0 if failure is None else 1)).nonzero().flatten().tolist()
        if not failed:
            return outcome  # type: ignore[no-any-return]
        message = ranks.broadcast_object(repr(failure), failed[0])
        raise failure or kind(f"{what} failed on rank {failed[0]}: {message}")
    finally:
        failure = None  # as above
