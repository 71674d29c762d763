"""Drafts: partial files of full size, into which each rank writes its own rows of sharded tensors.

Nothing is gathered: a rank's rows of a tensor are a few runs of bytes, whose offsets all ranks know. The ranks must
be on one machine and see one file system; others gather (`parts.py`). Several machines gather even if they share
files: two NFS clients that write to one page may overwrite each other's bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duoka.checkpoint import disk
from duoka.checkpoint.image import Layout
from duoka.checkpoint.parts import is_sharded
from duoka.checkpoint.ranks import Ranks
from duoka.checkpoint.stored import bytes_of
from duoka.system.machine_name import machine_name

PIECE = 16 << 20  # bytes of a tensor on a GPU that are copied at once


@dataclass(frozen=True)
class Draft:
    """A partial file without the data of its tensors. places: offset of each tensor in the file."""

    path: Path
    places: Mapping[str, int]


def draft_of(layout: Layout, path: Path) -> Draft:
    """Make a draft of a safetensors file."""
    disk.write_empty(path, layout.header, len(layout.header) + layout.size)
    return Draft(path, {name: len(layout.header) + at for name, at in layout.places.items()})


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
    """Write this rank's rows of each tensor; on the first rank also those that are whole on every rank."""
    disk.write_at(draft.path, _own_bytes(draft, tensors, is_first))


def _own_bytes(draft: Draft, tensors: Mapping[str, Tensor], is_first: bool) -> Iterator[tuple[int, memoryview]]:
    for name in draft.places:
        tensor = tensors[name]
        for at, rows in own_runs(tensor) if is_sharded(tensor) else [(0, tensor)] if is_first else []:
            plain = rows.detach().resolve_conj().resolve_neg().reshape(-1)
            many = max(PIECE // plain.itemsize, 1)
            for number in range(0, plain.numel(), many):
                start = draft.places[name] + at + number * plain.itemsize
                yield start, bytes_of(plain[number : number + many].cpu())


def own_runs(tensor: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the contiguous runs of this rank's rows of a sharded tensor, each with its offset in the whole in bytes.

    It is one run if the tensor is sharded along its first dimension.
    """
    spec = tensor._spec
    rows = tensor.to_local().detach().contiguous()
    row = math.prod(tensor.shape[spec.dim + 1 :]) * tensor.itemsize
    runs = rows.view(math.prod(tensor.shape[: spec.dim]), -1) if rows.numel() else ()
    for number, run in enumerate(runs):
        yield (number * tensor.shape[spec.dim] + spec.partition.start) * row, run
