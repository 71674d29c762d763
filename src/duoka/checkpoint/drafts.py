"""Drafts: partial files of full size, into which each rank writes its own rows of sharded tensors.

Nothing is gathered: a rank's rows of a tensor are a few runs of bytes, whose offsets all ranks know. The ranks must
be on one machine and see one file system; others gather (`parts.py`). Several machines gather even if they share
files: two NFS clients that write to one page may overwrite each other's bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duoka.checkpoint import disk
from duoka.checkpoint.image import Layout
from duoka.checkpoint.ranks import Ranks
from duoka.checkpoint.rows import Run, is_sharded, runs_of
from duoka.checkpoint.stored import bytes_of
from duoka.system.machine import machine_name
from duoka.view.tensor.batch import BatchTensor

PIECE = 16 << 20  # bytes of a tensor on a GPU that are copied at once


@dataclass(frozen=True)
class Draft:
    """A partial file of `size` bytes. header: its first bytes. places: offset of each tensor in the file."""

    path: Path
    header: bytes
    places: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, layout: Layout, path: Path) -> Draft:
        """Plan a safetensors file."""
        begin = len(layout.header)
        return cls(path, layout.header, {name: begin + at for name, at in layout.places.items()}, begin + layout.size)


def own_runs(tensor: Tensor, is_first: bool) -> list[Run]:
    """Return what this rank writes of a tensor; of one that is whole on every rank the first rank writes all."""
    if isinstance(tensor, BatchTensor) and is_sharded(tensor):
        return runs_of(tensor, tensor.itemsize)
    return [Run(0, 0, tensor.numel() * tensor.itemsize)] if is_first else []


def own_rows(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this rank holds."""
    return (tensor.to_local() if isinstance(tensor, BatchTensor) else tensor).detach()


def all_see(ranks: Ranks, path: Path, writes: bool) -> bool:
    """Return True if all ranks that write run on rank 0's machine, and see the file or directory that it has made.

    writes: True if this rank does. All ranks must call this.
    """
    try:
        found: Any = (machine_name(), os.stat(path).st_ino)
    except OSError:
        found = None
    sees = found == ranks.broadcast_object(found, 0) and found is not None
    return bool(ranks.all_gather(torch.tensor(int(sees or not writes), device="cpu")).all())


def write_own(draft: Draft, tensors: Mapping[str, Tensor], is_first: bool) -> None:
    """Write this rank's rows of each tensor; on the first rank also the header, and what is whole on every rank."""
    disk.write_at(draft.path, _own_parts(draft, tensors, is_first))


def _own_parts(draft: Draft, tensors: Mapping[str, Tensor], is_first: bool) -> Iterator[tuple[int, disk.Data]]:
    if is_first:
        yield 0, draft.header
    for name, place in draft.places.items():
        for run, pieces in own_pieces(tensors[name], own_runs(tensors[name], is_first)):
            for at, piece in pieces:
                yield place + run.at + at, piece


def own_pieces(tensor: Tensor, runs: Sequence[Run]) -> Iterator[tuple[Run, Iterator[tuple[int, memoryview]]]]:
    """Yield each run of this rank's rows with its bytes: in pieces, each with its offset in the run."""
    if not runs:
        return
    flat = own_rows(tensor).resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)

    def pieces(run: Run) -> Iterator[tuple[int, memoryview]]:
        for at in range(0, run.size, PIECE):
            yield at, bytes_of(flat[run.start + at : run.start + min(at + PIECE, run.size)].cpu())

    for run in runs:
        yield run, pieces(run)
