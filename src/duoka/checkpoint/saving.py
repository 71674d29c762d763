"""`save_weights`: save a model's tensors under the model's own names, atomically."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from duoka.checkpoint import disk
from duoka.checkpoint.image import lay_out, straight
from duoka.checkpoint.names import WRAPPERS
from duoka.checkpoint.ranks import Ranks, on_first, ranks_here
from duoka.checkpoint.shards import parse_size, remove_shards, split, write_shards
from duoka.errors import OptionError, WeightsError
from duoka.view.tensor.batch import BatchTensor

PICKLES = (".pth", ".pt", ".bin", ".ckpt")
_PARALLEL = frozenset({"DataParallel", "DistributedDataParallel"})


def save_weights(
    model: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Save a model's parameters and buffers under its own names, without what wrappers add to them.

    The file is replaced atomically. With several ranks all must call this; rank 0 writes.

    Args:
        model: the model, or its state dict.
        path: `.safetensors`; or `.pth`, `.pt`, `.bin`, `.ckpt` for the format of `torch.save`.
        metadata: strings to keep in the file's header (safetensors only).
        max_shard_size: bytes, or "5GB": larger models become several files and an index, with Hugging Face's names
            (`model-00001-of-00003.safetensors`, `model.safetensors.index.json`). None: one file.
        ranks: the ranks that save together; by default those that hold parts of the model, else those of
            torch.distributed.

    Raises:
        OptionError: `path` has another suffix, or the size is invalid.
        WeightsError: the file cannot be written, or a tensor cannot be stored in safetensors.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", *PICKLES):
        raise OptionError("path", str(path), f"a name that ends in .safetensors, or in {', '.join(PICKLES)}")
    most = None if max_shard_size is None else parse_size(max_shard_size)
    ranks = ranks or _ranks_of(model)
    tensors = plain_state(model)
    on_first(ranks, partial(write_weights, tensors, path, metadata or {}, most))


def _ranks_of(model: nn.Module | Mapping[str, Any]) -> Ranks:
    """Return the ranks that hold parts of a model, else those of torch.distributed."""
    tensors = model.values() if isinstance(model, Mapping) else model.parameters()
    sharded = next((tensor for tensor in tensors if isinstance(tensor, BatchTensor)), None)
    return ranks_here() if sharded is None else sharded._spec.view.ranks


def write_weights(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str], most: int | None = None
) -> None:
    """Write tensors in the format of the suffix; to several files if they are more than `most` bytes.

    Raises:
        WeightsError: the file cannot be written, or the format cannot hold the tensors.
    """
    parts = [dict(tensors)] if most is None else split(tensors, most)
    write = partial(_write_one, metadata=metadata)
    try:
        if len(parts) > 1:
            write_shards(path, parts, write)
        else:
            write(parts[0], path)
            remove_shards(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be written; the old file is unchanged: {error}") from error


def _write_one(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    if path.suffix in PICKLES:
        disk.replace(path, partial(_pickle, tensors))
    else:
        layout = lay_out(tensors, {"format": "pt", **metadata})  # transformers requires this entry
        disk.replace(path, lambda beside: disk.write(beside, straight(tensors, layout)))


def _pickle(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        torch.save(tensors, path)
    except RuntimeError as error:  # raised by torch for a failed write
        raise OSError(str(error).splitlines()[0]) from error
    disk.sync(path)


def plain_state(
    model: nn.Module | Mapping[str, Any], taken: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Return a model's tensors by its own names, each as `taken` gives it (default: whole).

    Raises:
        WeightsError: two would get the same name.
    """
    taken = taken or whole
    state = dict(model) if isinstance(model, Mapping) else model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise WeightsError(
            f"{others[0]!r} is not a tensor but {type(state[others[0]]).__name__}; a duoka.Checkpoint can save it"
        )
    wrapped = _wrapped(model)
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        own = _without(name, wrapped)
        if own in plain:
            raise WeightsError(f"two tensors would have the name {own!r}, one of them is {name!r}")
        plain[own] = taken(tensor)
    return plain


def plain_names(model: nn.Module) -> dict[str, str]:
    """Map the names in the model's state dict to its own names."""
    wrapped = _wrapped(model)
    return {name: _without(name, wrapped) for name in model.state_dict()}


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor to the CPU of rank 0, and to the meta device elsewhere; return others unchanged.

    All ranks must call this. It needs device memory for one whole tensor at a time.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    gathered: Tensor = tensor.full_tensor().detach()
    rank = tensor._spec.view.ranks.rank if isinstance(tensor, BatchTensor) else torch.distributed.get_rank()
    return gathered.to("meta" if rank else "cpu")


def _wrapped(model: nn.Module | Mapping[str, Any]) -> set[str]:
    """Return the paths named "module" that a wrapper has inserted."""
    if isinstance(model, Mapping):
        return {"module"} if model and all(name.startswith("module.") for name in model) else set()
    parallel = [
        path for path, part in model.named_modules(remove_duplicate=False) if type(part).__name__ in _PARALLEL
    ]
    return {f"{path}.module" if path else "module" for path in parallel}


def _without(name: str, wrapped: set[str]) -> str:
    parts = name.split(".")
    kept = [
        part
        for number, part in enumerate(parts[:-1])
        if ".".join(parts[: number + 1]) not in wrapped and part not in WRAPPERS - {"module"}
    ]
    return ".".join([*kept, parts[-1]])
