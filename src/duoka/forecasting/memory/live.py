"""Follow the storages of tensors, from the operator that makes each to the moment it is freed.

A storage is counted when an operator returns a tensor that has it, and if torch has allocated it: not a NumPy array's
or a shared one. Memory that an operator needs only while it runs, and that of communication libraries, is not seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from duoka.private.torch import TorchDispatchMode
from duoka.view.tensor.batch import BatchTensor


class LiveStorages(TorchDispatchMode, ABC):
    """Numbers the storages that operators make while this mode is active. total: bytes that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._numbers: dict[int, tuple[int, int, ref[Any]]] = {}  # id of the storage -> number, bytes, itself
        self._next = 0

    @abstractmethod
    def made(self, number: int, size: int, tensor: Tensor, inputs: list[int | None]) -> None:
        """Note a new storage, or one whose size has changed (which is freed before).

        inputs: the numbers of the operator's inputs; None for one that is not followed.
        """

    @abstractmethod
    def freed(self, number: int, size: int) -> None:
        """Note that a storage is freed."""

    def used(self, numbers: list[int | None]) -> None:
        """Note the inputs of an operator, before it runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [self.number(tensor) for tensor in _plain((*args, *kwargs.values()))]
        self.used(inputs)
        out = func(*args, **kwargs)
        for tensor in _plain(out if isinstance(out, (tuple, list)) else (out,)):
            self.follow(tensor, inputs)
        return out

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None if it is not followed."""
        found = self._numbers.get(id(tensor.untyped_storage()))
        return None if found is None else found[0]

    def follow(self, tensor: Tensor, inputs: list[int | None]) -> None:
        """Follow the storage of a tensor from now on."""
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), id(storage)
        known = self._numbers.get(key)
        if known is not None and known[1] == size:
            return
        if known is not None:  # resized
            self._forget(key)
        if not size or not storage.resizable():  # one of other memory cannot be resized
            return
        self._next += 1
        self._numbers[key] = self._next, size, ref(storage, lambda _: self._forget(key))
        self.total += size
        self.made(self._next, size, tensor, inputs)

    def _forget(self, key: int) -> None:
        number, size, _ = self._numbers.pop(key)
        self.total -= size
        self.freed(number, size)


class PeakStorages(LiveStorages):
    """Notes the most bytes that were alive at once. peak: since it was last set."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def made(self, number: int, size: int, tensor: Tensor, inputs: list[int | None]) -> None:
        self.peak = max(self.peak, self.total)

    def freed(self, number: int, size: int) -> None:
        """Do nothing: the peak is reached when something is made."""


def _plain(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield tensors with memory of their own, in lists of the values, too."""
    for value in values:
        if isinstance(value, Tensor):
            if not isinstance(value, BatchTensor) and value.layout is torch.strided and not value.is_meta:
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _plain(value)
