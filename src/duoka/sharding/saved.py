"""What functions save for the backward pass: of an unsharded parameter its position, so that its memory is freed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from duoka.private.torch import memory_of, outer_saved_tensors_hooks, version_of
from duoka.sharding.block import Block
from duoka.sharding.blocks import Blocks
from duoka.view.tensor.batch import Function


class _Saved(Protocol):
    def tensor(self) -> Tensor: ...


def saving_positions(blocks: Blocks) -> AbstractContextManager[None]:
    """Return a context in which functions save the block and index of parameters in place of their memory."""
    outer = outer_saved_tensors_hooks()

    def pack(tensor: Tensor) -> _Saved:
        position = blocks.memory.get(memory_of(tensor)) if tensor.layout is torch.strided else None
        if position is not None:
            return _SavedParameter(*position, tensor)
        return _SavedTensor(tensor) if outer is None else _SavedElsewhere(outer[1], outer[0](tensor))

    return saved_tensors_hooks(pack, lambda saved: saved.tensor())


class _SavedParameter:
    __slots__ = ("_block", "_dtype", "_index", "_layout")

    def __init__(self, block: Block, index: int, tensor: Tensor) -> None:
        self._block, self._index, self._dtype = block, index, tensor.dtype
        self._layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        with torch.no_grad():
            return self._block.operands([(self._index, self._dtype)])[0].as_strided(*self._layout)


class _SavedTensor:
    __slots__ = ("_saved_version", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._saved_version = tensor, version_of(tensor)

    def tensor(self) -> Tensor:
        version = version_of(self._tensor)
        if version != self._saved_version:  # torch does not check tensors with hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._tensor.shape)} is at version {version}; expected version "
                f"{self._saved_version} instead."
            )
        return self._tensor


class _SavedElsewhere:
    """A tensor that hooks of the script, around the function, have packed."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Function, packed: Any) -> None:
        self._unpack, self._packed = unpack, packed

    def tensor(self) -> Tensor:
        tensor: Tensor = self._unpack(self._packed)
        return tensor
