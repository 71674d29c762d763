"""Files of tensors, some of them sharded: the layout of a file, and the bytes that each rank writes into it.

A rank's rows of a tensor are a few spans of bytes, whose offsets in the file all ranks know. The ranks of one machine
open one file, and each writes its spans: nothing is gathered. Ranks of several machines send each other the spans
(`exchange_rows`), even if they share files: two NFS clients that write to one page may overwrite each other's bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from duoka.checkpoint.formats import DTYPES, bytes_of
from duoka.checkpoint.formats.safetensors import WIDENED
from duoka.checkpoint.ranks import Ranks
from duoka.collectives.base import Collectives
from duoka.errors import WeightsError
from duoka.system import disk
from duoka.system.processes import machine_name
from duoka.view.tensor.batch import BatchTensor

BLOCK = 8 << 20  # bytes that are copied from a GPU, or sent to another rank, at once


@dataclass(frozen=True)
class Layout:
    """A safetensors file. header: all bytes before the data. offsets: start of each tensor. size: of the file."""

    header: bytes
    offsets: Mapping[str, int]
    size: int


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Layout:
    """Compute the layout in the order of the safetensors library: large elements first, for alignment, then by name.

    Raises WeightsError if a tensor is sparse, quantised or on the meta device, and so has no plain data.
    """
    codes = {name: _code(name, tensor) for name, tensor in tensors.items()}
    widened = sorted(name for name, (code, _) in codes.items() if code == "C128")  # which safetensors has no code for
    if widened:
        metadata = {**metadata, WIDENED: json.dumps(widened)}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ends: dict[str, int] = {}
    at = 0
    for name in sorted(tensors, key=lambda name: (-codes[name][1], name)):
        code, shape = codes[name][0], list(tensors[name].shape)
        begin, at = at, at + math.prod(shape) * codes[name][1]
        code, shape = ("F64", [*shape, 2]) if code == "C128" else (code, shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, at]}
        ends[name] = begin
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    return Layout(text, {name: len(text) + begin for name, begin in ends.items()}, len(text) + at)


def _code(name: str, tensor: Tensor) -> tuple[str, int]:
    known = DTYPES.get(str(tensor.dtype)[6:])
    if known is None or tensor.layout != torch.strided or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}".replace("torch.", "")
        raise WeightsError(f"{name!r} is {kind}, which safetensors cannot store; a .pth file can")
    return known


# What each rank holds.


def is_sharded(value: Any) -> bool:
    """Return True for a tensor whose rows are divided over ranks (with hsdp, over those of each machine)."""
    if not isinstance(value, BatchTensor):
        return False
    spec = value._spec
    return spec.view.of_parameters and spec.outer == 1 == spec.inner


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
    return local_rows(tensor).resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


class Span(NamedTuple):
    """Bytes of a tensor, or of a file, that one rank holds.

    at: offset in the tensor or the file. start: offset in the rank's rows. size: in bytes. name: of the tensor.
    """

    at: int
    start: int
    size: int
    name: Any = None


def runs_of(tensor: BatchTensor, itemsize: int, rank: int | None = None) -> list[Span]:
    """Return the contiguous byte ranges that a rank's rows (default: this rank's) occupy in a sharded tensor.

    There is one range if the tensor is sharded along its first dimension; none if the rank has no elements.
    itemsize: bytes per element.
    """
    spec, shape = tensor._spec, tensor.shape
    row = math.prod(shape[spec.dim + 1 :]) * itemsize
    first, end = (row * bound for bound in spec.partition.bounds(spec.partition.rank if rank is None else rank))
    size = end - first
    count = math.prod(shape[: spec.dim]) if size else 0
    return [Span(number * shape[spec.dim] * row + first, number * size, size) for number in range(count)]


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
        for number in (*range(first, len(files)), *range(first)):  # writes to one file wait for each other
            write(number, parts_of(files[number], tensors, rank))
        return
    exchanges = {
        start: exchange_rows(files[start : start + count], tensors, ranks) for start in range(0, len(files), count)
    }
    try:
        for start, parts in exchanges.items():
            if start + rank < len(files):
                write(start + rank, parts)
            deque(parts, maxlen=0)
    finally:
        for parts in exchanges.values():  # after an error: the other ranks wait for what this one sends
            deque(parts, maxlen=0)


def share_files(ranks: Ranks, directory: Any, writes: bool) -> bool:
    """Return True if all ranks that write run on rank 0's machine, and see the directory that it sees.

    writes: True if this rank does. All ranks must call this.
    """
    try:
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
    device = next(tensor.device for tensor in tensors.values() if is_sharded(tensor))
    spans = [[spans_of(offsets, tensors, source) for source in range(count)] for offsets in files]
    longest = max(sum(span.size for span in each) for sources in spans for each in sources)
    size = min(BLOCK, longest)
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
