"""Divide the batches of a job among its ranks; each rank gets all outputs, in order."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from duoka.errors import DuokaError


class JobRanks(Protocol):
    """The ranks of a job, as one of them sees them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value`, which must be picklable, in the order of ranks. A collective call."""
        ...


@dataclass(frozen=True, slots=True)
class RankOutputs:
    """One rank's contribution to a round: the outputs of a batch, None after its last; or its error."""

    outputs: list[Any] | None = None
    error: DuokaError | None = None


def gather_outputs(mine: Iterator[list[Any]], ranks: JobRanks) -> Iterator[list[Any]]:
    """Yield the outputs of all batches, gathered round by round.

    Raises:
        DuokaError: an error of any rank, raised on every rank so that none waits for it.
    """
    while True:
        parts = [_deserialized(data) for data in ranks.gather_objects(_serialized(_next_outputs(mine)))]
        for part in parts:
            if part.error is not None:
                raise part.error
        if all(part.outputs is None for part in parts):
            return
        yield from (part.outputs for part in parts if part.outputs is not None)


def _next_outputs(mine: Iterator[list[Any]]) -> RankOutputs:
    try:
        return RankOutputs(next(mine, None))
    except DuokaError as error:
        return RankOutputs(error=error)


def _serialized(part: RankOutputs) -> bytes:
    """Serialize by torch.save: pickle would write the whole batch for each row, as rows are views of it."""
    file = io.BytesIO()
    torch.save(part, file)
    return file.getvalue()


def _deserialized(data: bytes) -> RankOutputs:
    return torch.load(io.BytesIO(data), weights_only=False)  # type: ignore[no-any-return]  # sent by this program
