"""Checkpoints of sharded models: whole tensors in a file for each rank, about 1/W of all bytes.

    model-00001-of-00002.safetensors      of rank 0
    model-00002-of-00002.safetensors      of rank 1
    model.safetensors.index.json          maps tensors to files, in Hugging Face's format

Each rank writes its own rows into all files (`drafts.py`), and leaves `rank-1.rows`. When all have, it computes the
digests of its file. Ranks that do not share files gather the tensors of their own file instead, one at a time. At the
end a rank other than 0 leaves its digests in `rank-1.json`, for which rank 0 waits before it writes the manifest.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duoka.checkpoint import disk
from duoka.checkpoint.manifest import INDEX, FileEntry
from duoka.checkpoint.rows import is_sharded
from duoka.errors import CheckpointError
from duoka.view.collectives.base import Collectives
from duoka.view.tensor.batch import BatchTensor

PATIENCE = 600.0  # seconds without a byte written by a rank for which rank 0 waits
_LOOK = 0.02  # seconds between two looks
_ALIGNED = 16  # bytes: rows of a tensor may be viewed as its dtype
PIECE = 8 << 20  # bytes that a rank sends to another at once


def holders(tensors: Iterable[Tensor]) -> Collectives | None:
    """Return the ranks that together hold all rows of these tensors; None if no tensor is sharded."""
    return next((tensor._spec.view.ranks for tensor in tensors if is_sharded(tensor)), None)  # type: ignore[attr-defined]


def are_first(ranks: Collectives) -> bool:
    """Return True if these ranks write the checkpoint: where each machine holds a copy, the first one's do."""
    return ranks.members[0] == 0


def assign(tensors: Mapping[str, Tensor], count: int) -> list[list[str]]:
    """Return the names of the tensors that each of `count` ranks writes. Those at one index are gathered together."""
    names = sorted(tensors, key=lambda name: (-tensors[name].numel() * tensors[name].element_size(), name))
    return [names[rank::count] for rank in range(count)]


def file_names(state: str, count: int) -> list[str]:
    """Return the name of each rank's file."""
    return [f"{state}-{rank + 1:05}-of-{count:05}.safetensors" for rank in range(count)]


def index_name(state: str) -> str:
    """Return the name of the index, which maps tensors to files."""
    return f"{state}.safetensors{INDEX}"


def index_text(tensors: Mapping[str, Tensor], assigned: Sequence[Sequence[str]], files: Sequence[str]) -> bytes:
    """Return the contents of the index."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    places = {name: file for names, file in zip(assigned, files, strict=True) for name in names}
    return (json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2) + "\n").encode()


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


# The end of a save.


def _mark(beside: Path, rank: int) -> Path:
    return beside / f"rank-{rank}.json"


def _tell(beside: Path, rank: int, value: Any) -> None:
    path = _mark(beside, rank)
    disk.write(path.with_suffix(disk.PARTIAL), (json.dumps(value).encode(),))
    os.rename(path.with_suffix(disk.PARTIAL), path)


def report(beside: Path, rank: int, entries: Mapping[str, FileEntry]) -> None:
    """Tell rank 0 that this rank's files are on the disk."""
    _tell(beside, rank, {name: asdict(entry) for name, entry in entries.items()})


def give_up(beside: Path, rank: int, why: str) -> None:
    """Tell rank 0 that this rank cannot write its files; if not even that can be written, remove the directory."""
    try:
        _tell(beside, rank, {"error": why})
    except OSError:
        with suppress(OSError):
            disk.remove(beside)


def say_written(beside: Path, rank: int) -> None:
    """Tell the other ranks that this rank's rows are on the disk, or, again, that it goes on."""
    disk.touch(_rows_mark(beside, rank))


def _rows_mark(beside: Path, rank: int) -> Path:
    return beside / f"rank-{rank}.rows"


def wait_for_rows(beside: Path, ranks: Collection[int], patience: float = PATIENCE) -> None:
    """Wait until other ranks have written their rows. Raises CheckpointError as `wait_for`."""

    def take(rank: int) -> bool:
        with suppress(FileNotFoundError):
            _raise_error(json.loads(_mark(beside, rank).read_bytes()), rank)
        return _rows_mark(beside, rank).exists()

    _wait(beside, ranks, take, patience)


def wait_for(beside: Path, ranks: Collection[int], patience: float = PATIENCE) -> dict[str, FileEntry]:
    """Wait for the files of other ranks, remove their marks, and return their digests.

    Raises:
        CheckpointError: a rank could not write its files, or has written nothing for `patience` seconds.
    """
    found: dict[str, FileEntry] = {}

    def take(rank: int) -> bool:
        with suppress(FileNotFoundError):
            mark = json.loads(_mark(beside, rank).read_bytes())
            _raise_error(mark, rank)
            found.update({name: FileEntry(**entry) for name, entry in mark.items()})
            _mark(beside, rank).unlink()
            return True
        return False

    _wait(beside, ranks, take, patience)
    for rank in (0, *ranks):
        _rows_mark(beside, rank).unlink(missing_ok=True)
    return found


def _raise_error(mark: Mapping[str, Any], rank: int) -> None:
    if "error" in mark:
        raise CheckpointError(f"rank {rank} could not write its part of the checkpoint: {mark['error']}")


def _wait(beside: Path, ranks: Collection[int], take: Callable[[int], bool], patience: float) -> None:
    """Wait until `take` has returned True for each rank."""
    missing, last, since = set(ranks), (-1, -1), time.monotonic()
    while missing := {rank for rank in sorted(missing) if not take(rank)}:
        if not beside.exists():
            raise CheckpointError("another rank could not write its part of the checkpoint, nor report the reason")
        now, present = time.monotonic(), _progress(beside)
        if present != last:
            last, since = present, now
        if now - since > patience:
            names = ", ".join(map(str, sorted(missing)))
            raise CheckpointError(f"rank {names} has written nothing of the checkpoint for {patience:.0f} s")
        time.sleep(_LOOK)


def _progress(directory: Path) -> tuple[int, int]:
    """Return the size of all files, and the time of the last write."""
    with suppress(OSError):
        found = [path.stat() for path in directory.iterdir()]
        return sum(each.st_size for each in found), max((each.st_mtime_ns for each in found), default=0)
    return -1, -1
