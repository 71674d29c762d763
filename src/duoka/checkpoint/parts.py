"""Checkpoints of sharded models: whole tensors in a file for each rank, about 1/W of all bytes.

    model-00001-of-00002.safetensors      of rank 0
    model-00002-of-00002.safetensors      of rank 1
    model.safetensors.index.json          maps tensors to files, in Hugging Face's format

Each rank writes its own rows into all files (`drafts.py`), and then computes the digests of its file. Ranks that do
not share files gather the tensors of their own file instead, one at a time (`gathering.py`). Marks on the disk tell
the ranks what the others have written (`marks.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from duoka.checkpoint.manifest import INDEX
from duoka.checkpoint.rows import is_sharded
from duoka.view.collectives.base import Collectives


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
