"""A tensor in a file: type and shape are known before its data are read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# torch's name of a type -> (its code in safetensors, bytes of one element)
DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "complex128": ("C128", 16),  # safetensors has no code for it: see `image`
}


class Stored(ABC):
    """A tensor in a file.

    dtype: torch's name, such as float32. shape: its sizes. nbytes: of its data.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the elements."""
        return self.numel * DTYPES.get(self.dtype, ("", 1))[1]

    @abstractmethod
    def read(self) -> Tensor:
        """Return the tensor, on the CPU. It may share memory with the file: copy it before writing into it."""

    def read_like(self, like: Tensor) -> Tensor:
        """Return the tensor, or, if `like` is sharded, this rank's part of it on the device of `like`."""
        return part_of(self.read(), like)

    def read_into(self, target: Tensor) -> None:
        """Copy the values into `target`, of the same shape; type and device stay the target's."""
        target.copy_(self.read_like(target))


class LoadedTensor(Stored):
    """A tensor that is in memory, or mapped from a file by torch."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)

    def read(self) -> Tensor:
        return self.tensor


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return `whole`, or this rank's part of it if `like` is sharded. No communication."""
    from duoka.view.sharded import shard_like
    from duoka.view.tensor.batch import BatchTensor

    if isinstance(like, BatchTensor):
        return shard_like(whole, like)
    if not hasattr(like, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor that is not empty; writable."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def is_plain_memory(tensor: Tensor) -> bool:
    """Return True if the memory of a tensor holds its values in order."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
