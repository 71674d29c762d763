"""Running a module without leaving a trace: buffers, attributes and random states are put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from duoka.view.draws import random_states, set_random_states

_MODULE_S_OWN = frozenset(nn.Module().__dict__)
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type, torch.dtype, torch.device, Tensor, nn.Module)
_LARGE = 1 << 20  # entries of an array that is not copied
_DEPTH = 4  # how far objects in attributes are followed


class Remains:
    """What a run of the module has left in its attributes, before it is put back."""

    def __init__(self, module: nn.Module, buffers: list[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
        self._module, self._buffers = module, buffers
        self._tensors = list(self._found(Tensor))
        self._versions = [tensor._version for tensor in self._tensors]

    def changed(self) -> bool:
        """Whether other code may see a tensor that was not there before: in an attribute, or a buffer's values."""
        if any(part._buffers.get(name) is not buffer for part, name, buffer, _ in self._buffers):
            return True
        if any(not torch.equal(buffer, kept) for _, _, buffer, kept in self._buffers):
            return True
        now = list(self._found(Tensor))
        same = len(now) == len(self._tensors) and all(a is b for a, b in zip(now, self._tensors, strict=True))
        return not same or self._versions != [tensor._version for tensor in now]

    def values(self) -> list[Any]:
        """The numbers and texts in the attributes."""
        return list(self._found((int, float, complex, str, bytes, bool)))

    def _found(self, kind: Any) -> Iterator[Any]:
        for part in self._module.modules():
            for name, value in part.__dict__.items():
                if name not in _MODULE_S_OWN:
                    yield from _leaves(value, kind, _DEPTH)


@contextmanager
def traceless(module: nn.Module) -> Iterator[Remains]:
    """Run the module inside of this. Its attributes are copies meanwhile; BatchNorm is set aside (evaluation)."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]
    parts = [(part, dict(part.__dict__)) for part in module.modules()]
    buffers = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    states = random_states()
    copies: dict[int, Any] = {}
    for part, before in parts:
        fresh = {name: _copied(value, copies) for name, value in before.items() if name not in _MODULE_S_OWN}
        part.__dict__.update(fresh)
    for norm in norms:
        norm.training = False
    try:
        yield Remains(module, buffers)
    finally:
        for part, before in parts:
            part.__dict__.clear()
            part.__dict__.update(before)
        for norm in norms:
            norm.training = True
        for part, name, buffer, kept in buffers:
            part._buffers[name] = buffer
            if not torch.equal(buffer, kept):
                with torch.no_grad():
                    buffer.copy_(kept)
        set_random_states(states)


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A copy to run with. Tensors and modules stay themselves, and so does what cannot be copied."""
    if isinstance(value, _CONSTANTS) or (isinstance(value, np.ndarray) and value.size > _LARGE):
        return value
    if id(value) in copies:
        return copies[id(value)]
    kind = type(value)
    made: Any
    if kind is dict:
        made = {key: _copied(entry, copies) for key, entry in value.items()}
    elif kind in (list, tuple, set):
        made = kind(_copied(entry, copies) for entry in value)
    elif isinstance(value, torch.Generator):
        made = value.clone_state()
    else:
        try:
            made = copy.deepcopy(value)
        except Exception:
            made = value
    copies[id(value)] = made
    return made


def _leaves(value: Any, kind: Any, depth: int) -> Iterator[Any]:
    """Everything of this kind in nested containers and objects."""
    if isinstance(value, kind):
        yield value
    elif depth == 0 or isinstance(value, _CONSTANTS) or callable(value):
        return
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _leaves(entry, kind, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for entry in value:
            yield from _leaves(entry, kind, depth - 1)
    elif hasattr(value, "__dict__"):
        for entry in vars(value).values():
            yield from _leaves(entry, kind, depth - 1)
