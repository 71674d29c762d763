"""Predictions of a job: each rank computes every so manieth batch, and every rank has all outputs, in order."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from duoka.errors import DuokaError


class Ranks(Protocol):
    """The ranks of a job, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, which pickle must know, in the order of ranks. All ranks call it."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a round: the outputs of a batch, None after its last; or why it has none."""

    outputs: list[Any] | None = None
    error: DuokaError | None = None


def shared(mine: Iterator[list[Any]], ranks: Ranks) -> Iterator[list[Any]]:
    """The outputs of all batches, from those of every rank's own ones, round by round.

    Raises:
        DuokaError: what a rank raised, on every rank, so that none waits for it.
    """
    while True:
        parts = [_unpacked(data) for data in ranks.gather_objects(_packed(_next_part(mine)))]
        for part in parts:
            if part.error is not None:
                raise part.error
        if all(part.outputs is None for part in parts):
            return
        yield from (part.outputs for part in parts if part.outputs is not None)


def _next_part(mine: Iterator[list[Any]]) -> Part:
    try:
        return Part(next(mine, None))
    except DuokaError as error:
        return Part(error=error)


def _packed(part: Part) -> bytes:
    """By torch: pickle would write the whole batch for each of its rows, as these are views of it."""
    file = io.BytesIO()
    torch.save(part, file)
    return file.getvalue()


def _unpacked(data: bytes) -> Part:
    return torch.load(io.BytesIO(data), weights_only=False)  # type: ignore[no-any-return]  # of this very program
