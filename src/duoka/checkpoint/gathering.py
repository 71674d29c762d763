"""Gather sharded tensors, each on the rank that writes it, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from duoka.checkpoint.rows import is_sharded
from duoka.view.tensor.batch import BatchTensor

_ALIGNED = 16  # bytes: rows of a tensor may be viewed as its dtype
PIECE = 8 << 20  # bytes that a rank sends to another at once


def gathered(
    tensors: Mapping[str, Tensor], assigned: Sequence[Sequence[str]], rank: int
) -> Iterator[tuple[str, Tensor]]:
    """Gather and yield the tensors that this rank writes, sharded ones to the CPU. All ranks must call this.

    While a piece is copied, or the caller writes a tensor, the next piece is sent.
    """
    sent = _sent(tensors, assigned, rank)
    arrive = next(sent, None)
    while arrive is not None:
        following = next(sent, None)
        found, arrive = arrive(), following
        if found is not None:
            yield found
        del found  # before the next one comes


def _sent(
    tensors: Mapping[str, Tensor], assigned: Sequence[Sequence[str]], rank: int
) -> Iterator[Callable[[], tuple[str, Tensor] | None]]:
    """Send pieces, one for each item; that function waits for it, and returns this rank's tensor when it is whole."""
    for place in range(max(map(len, assigned))):
        names = [names[place] if place < len(names) else None for names in assigned]
        group = [None if name is None else tensors[name] for name in names]
        shards = [tensor if is_sharded(tensor) else None for tensor in group]
        name, own = names[rank], group[rank]
        if any(shard is not None for shard in shards):
            yield from _exchange(shards, rank, name or "")
        if any(shard is None for shard in shards):  # an item on every rank, so that all send and wait in one order
            kept = None if name is None or own is None or shards[rank] is not None else (name, own)
            yield partial(_as_it_is, kept)


def _as_it_is(found: tuple[str, Tensor] | None) -> tuple[str, Tensor] | None:
    return found


def _exchange(shards: Sequence[Any], rank: int, name: str) -> Iterator[Callable[[], tuple[str, Tensor] | None]]:
    """Send tensor r of a group to rank r in pieces, so that a rank's memory holds its tensor and little more."""
    first = next(shard for shard in shards if shard is not None)
    ranks, device = first._spec.view.ranks, first.device
    rows = [None if shard is None else _bytes_of(shard.to_local().detach().contiguous()) for shard in shards]
    most = max(0 if shard is None else shard._spec.partition.largest * _row_bytes(shard) for shard in shards)
    size = min(PIECE, -(-most // _ALIGNED) * _ALIGNED)
    own = None if shards[rank] is None else _Arriving(shards[rank])
    for at in range(0, most, size):
        pieces = torch.zeros((len(shards), size), dtype=torch.uint8, device=device)
        for place, row in enumerate(rows):
            if row is not None:
                piece = row[at : at + size]
                pieces[place, : piece.numel()] = piece
        wait = ranks.in_background(ranks.start_all_to_all(pieces))
        del pieces

        def arrive(at: int = at, wait: Callable[[], Tensor] = wait) -> tuple[str, Tensor] | None:
            came = wait()
            if own is None:
                return None
            own.take(at, came)
            return (name, own.whole()) if at + size >= most else None

        yield arrive


class _Arriving:
    """A tensor, on the CPU, whose rows arrive from all ranks in pieces."""

    def __init__(self, part: BatchTensor) -> None:
        self._shape, self._dtype, self._dim = part.shape, part.dtype, part._spec.dim
        self._sizes = part._spec.partition.sizes
        self._bytes = [size * _row_bytes(part) for size in self._sizes]
        self._memory: Tensor | None = None

    def take(self, at: int, came: Tensor) -> None:
        """Store a piece of each rank's rows. at: the byte of the rows at which the pieces begin."""
        if self._memory is None:
            self._memory = torch.empty(sum(self._bytes), dtype=torch.uint8, device="cpu")
        for rows, piece in zip(self._memory.split(self._bytes), came, strict=True):
            own = rows[at : at + piece.numel()]
            own.copy_(piece[: own.numel()])

    def whole(self) -> Tensor:
        """Return the tensor, once all pieces were stored."""
        assert self._memory is not None
        memory, self._memory = self._memory, None
        if self._dim == 0:
            return memory.view(self._dtype).view(self._shape)
        shapes = [[*self._shape[: self._dim], size, *self._shape[self._dim + 1 :]] for size in self._sizes]
        rows = memory.split(self._bytes)
        found = [own.clone().view(self._dtype).view(shape) for own, shape in zip(rows, shapes, strict=True)]
        return torch.cat(found, self._dim)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _row_bytes(part: BatchTensor) -> int:
    rows = part.shape[part._spec.dim]
    return part.numel() // rows * part.dtype.itemsize
