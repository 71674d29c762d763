"""Files of tensors, some of them sharded: the bytes that each rank writes into them.

A rank's rows of a tensor are a few spans of bytes, whose offsets in the file all ranks know. The ranks of one machine
open one file, and each writes its spans: nothing is gathered. Ranks of several machines send each other the spans
(`exchange_rows`), even if they share files: two NFS clients that write to one page may overwrite each other's bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from duoka.checkpoint.formats import Span, bytes_of, is_sharded, runs_of
from duoka.checkpoint.ranks import Ranks
from duoka.collectives.base import Collectives
from duoka.system import disk
from duoka.system.processes import machine_name
from duoka.view.tensor.batch import BatchTensor

BLOCK = 8 << 20  # bytes that are copied from a GPU, or sent to another rank, at once


# What each rank holds.


def holders(tensors: Iterable[Tensor]) -> Collectives | None:
    """Return the ranks that together hold all rows of these tensors; None if no tensor is sharded."""
    return next((tensor._spec.view.ranks for tensor in tensors if is_sharded(tensor)), None)  # type: ignore[attr-defined]


def are_first(ranks: Collectives) -> bool:
    """Return True if these ranks write: where each machine holds a copy, the first one's do."""
    return ranks.members[0] == 0


def local_rows(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this rank holds."""
    return (tensor.to_local() if isinstance(tensor, BatchTensor) else tensor).detach()


def flat(tensor: Tensor) -> Tensor:
    """Return the bytes of this rank's rows; without a copy, if they are contiguous."""
    return local_rows(tensor).resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def spans_of(offsets: Mapping[Any, int], tensors: Mapping[Any, Tensor], rank: int) -> list[Span]:
    """Return what a rank writes of a file; of tensors that all ranks hold, rank 0 writes all.

    offsets: start of each tensor in the file.
    """
    spans: list[Span] = []
    for name, begin in offsets.items():
        tensor = tensors[name]
        if isinstance(tensor, BatchTensor) and is_sharded(tensor):
            runs = runs_of(tensor, tensor.itemsize, rank)
        else:
            runs = [Span(0, 0, tensor.numel() * tensor.itemsize)] if rank == 0 and tensor.numel() else []
        spans += [Span(begin + at, start, size, name) for at, start, size, _ in runs]
    return spans


def _blocks(spans: Iterable[Span], size: int) -> Iterator[list[Span]]:
    """Cut spans into blocks of `size` bytes together; the last block may be smaller."""
    block: list[Span] = []
    room = size
    for span in spans:
        while span.size:
            part = min(room, span.size)
            block.append(span._replace(size=part))
            span = span._replace(at=span.at + part, start=span.start + part, size=span.size - part)
            room -= part
            if not room:
                yield block
                block, room = [], size
    if block:
        yield block


# Writing.


Part = tuple[int, disk.Data]  # offset in a file, and bytes


def parts_of(offsets: Mapping[Any, int], tensors: Mapping[Any, Tensor], rank: int) -> Iterator[Part]:
    """Yield what this rank writes of a file."""
    for block in _blocks(spans_of(offsets, tensors, rank), BLOCK):
        for at, start, size, name in block:
            yield at, bytes_of(flat(tensors[name])[start : start + size].cpu())


def write_rows(
    files: Sequence[Mapping[Any, int]],
    tensors: Mapping[Any, Tensor],
    ranks: Collectives,
    shares: bool,
    write: Callable[[int, Iterator[Part]], None],
) -> None:
    """Call `write` with the number of each file that this rank writes, and with the parts. All ranks must call this.

    files: the offsets of tensors in each, as in `spans_of`. shares: the ranks share files, so that each writes its
    rows into all of them; else each writes some of the files, whose rows all ranks send.
    """
    rank, count = ranks.rank, ranks.world_size
    if not are_first(ranks):
        return
    if shares:
        first = rank * len(files) // count
        # Each begins with another file: the kernel writes to one inode one after the other.
        for number in (*range(first, len(files)), *range(first)):
            write(number, parts_of(files[number], tensors, rank))
        return
    exchanges = {
        start: exchange_rows(files[start : start + count], tensors, ranks) for start in range(0, len(files), count)
    }
    try:
        for start, parts in exchanges.items():
            if start + rank < len(files):
                write(start + rank, parts)
            deque(parts, maxlen=0)  # a rank without a file still sends
    finally:
        for parts in exchanges.values():  # after an error: the other ranks wait for what this one sends
            deque(parts, maxlen=0)


def share_files(ranks: Ranks, directory: Any, writes: bool) -> bool:
    """Return True if all ranks that write run on rank 0's machine, and see the directory that it sees.

    writes: True if this rank does. All ranks must call this.
    """
    try:
        # The name, too: two machines may see the same numbers, on disks of their own or on one file server.
        status = os.stat(directory)
        seen: Any = (machine_name(), status.st_dev, status.st_ino)
    except OSError:
        seen = None
    agrees = seen == ranks.broadcast_object(seen, 0) and seen is not None
    return bool(ranks.all_gather(torch.tensor(int(agrees or not writes), device="cpu")).all())


def exchange_rows(
    files: Sequence[Mapping[Any, int]], tensors: Mapping[Any, Tensor], ranks: Collectives
) -> Iterator[Part]:
    """Send file r to rank r; yield the parts of this rank's file. All ranks must call this.

    While the caller writes a block, the next one is sent. files: the offsets of tensors in each, as in `spans_of`.
    """
    rank, count = ranks.rank, ranks.world_size
    # The blocks are where the tensors are: a library of GPUs sends from GPUs only.
    device = next(tensor.device for tensor in tensors.values() if is_sharded(tensor))
    spans = [[spans_of(offsets, tensors, source) for source in range(count)] for offsets in files]
    longest = max(sum(span.size for span in each) for sources in spans for each in sources)
    size = min(BLOCK, longest)  # an all-to-all has blocks of one size
    leaving = [_blocks(sources[rank], size) for sources in spans]
    coming = [_blocks(each, size) for each in spans[rank]] if rank < len(files) else []

    def send() -> Callable[[], Tensor]:
        blocks = torch.zeros((count, size), dtype=torch.uint8, device=device)
        for row, stream in zip(blocks, leaving, strict=False):
            at = 0
            for span in next(stream, ()):
                row[at : at + span.size] = flat(tensors[span.name])[span.start : span.start + span.size]
                at += span.size
        return ranks.in_background(ranks.start_all_to_all(blocks))

    rounds = -(-longest // size) if size else 0
    arrive = send() if rounds else None
    for number in range(rounds):
        assert arrive is not None
        following = send() if number + 1 < rounds else None
        blocks, arrive = arrive().cpu(), following
        for row, stream in zip(blocks, coming, strict=False):
            at = 0
            for span in next(stream, ()):
                yield span.at, bytes_of(row[at : at + span.size])
                at += span.size
