"""Copies of a module for one call on several devices: they share its parameters, by autograd, and nothing else.

torch.nn.parallel.replicate is the model for it. Here a module's own references to its parts are those of the copy
(methods kept as attributes, lists of layers), and what a call leaves in attributes is not lost.
"""

from __future__ import annotations

import copy as shallow
from collections import deque
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from duoka.errors import Refused
from duoka.private.torch import COMPILED_CALL, TENSORS_AND_CHILDREN, Broadcast, buffers_in
from duoka.view.standin import StandIn

_CONTAINERS = (list, tuple, dict, set, deque)
_LONG = 1000  # entries of a container that is not looked through


class Copies:
    """One copy of `module` for each of `devices`. The first has the module's own buffers, the others have copies."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        self.module = module
        parameters, buffers = list(module.parameters()), list(module.buffers())
        on_each = zip(_spread(parameters, devices), _buffers(buffers, devices), strict=True)
        names = [*map(id, parameters), *map(id, buffers)]
        self._parts = list(module.modules())
        self._tables: list[dict[int, Any]] = [dict(zip(names, [*p, *b], strict=True)) for p, b in on_each]
        self._copies = [_copied(self._parts, table) for table in self._tables]
        self._before = [[_state(part) for part in parts] for parts in self._copies]

    def of(self, stand_in: StandIn) -> list[StandIn]:
        """What stands in the place of the copies' forward pass as this one does of the module's."""
        return [_translated(stand_in, table) for table in self._tables]

    def keep_changes(self, compare_buffers: bool) -> None:
        """What the call has left in the copies' attributes and buffers is the module's, if all have left the same.

        compare_buffers: whether to see that all copies have written the same into them.

        Raises:
            Refused: they have not.
        """
        for place, part in enumerate(self._parts):
            states = [_state(parts[place]) for parts in self._copies]
            for name, value in states[0].items():
                if self._is_as_before(place, name, states):
                    continue
                if not all(name in state and _alike(value, state[name]) for state in states[1:]):
                    raise Refused(self._apart(place, name))
                _set(part, name, value)
        if compare_buffers:
            self._compare_buffers()

    def _is_as_before(self, place: int, name: str, states: list[dict[str, Any]]) -> bool:
        return all(
            name in before[place] and _alike(before[place][name], state.get(name), by_identity=True)
            for before, state in zip(self._before, states, strict=True)
        )

    def _compare_buffers(self) -> None:
        first, *others = (dict(parts[0].named_buffers()) for parts in self._copies)
        for name, buffer in first.items():
            if any(not _alike(buffer, other.get(name)) for other in others):
                raise Refused(self._apart(0, name))

    def _apart(self, place: int, name: str) -> str:
        part = type(self._parts[place]).__name__
        return (
            f"{part}.{name} is set by the forward pass, to another value for each device's rows; return it as an "
            "output, or use several workers (duoka run, duoka.launch) in place of strategy='dp'"
        )


def _spread(parameters: list[nn.Parameter], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """The parameters for each device; gradients come back to the parameters themselves."""
    if devices[0].type != "cuda" or not parameters:
        return [[parameter.to(device) for parameter in parameters] for device in devices]
    flat = Broadcast.apply([device.index for device in devices], *parameters)  # in few large transfers
    return [list(flat[start : start + len(parameters)]) for start in range(0, len(flat), len(parameters))]


def _buffers(buffers: list[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    return [buffers, *([buffer.detach().to(device, copy=True) for buffer in buffers] for device in devices[1:])]


def _copied(parts: list[nn.Module], table: dict[int, Any]) -> list[nn.Module]:
    """A copy of each part, in which what is in the table (by identity) stands for what it was."""
    copies = [part.__class__.__new__(part.__class__) for part in parts]
    table.update((id(part), copy) for part, copy in zip(parts, copies, strict=True))
    for part, copy in zip(parts, copies, strict=True):
        copy.__dict__.update({name: _translated(value, table) for name, value in part.__dict__.items()})
        copy.__dict__[COMPILED_CALL] = None  # was compiled for the module itself
    return copies


def _translated(value: Any, table: dict[int, Any]) -> Any:
    """What an attribute of a copy is: containers are its own, objects are shared."""
    if isinstance(value, (Tensor, nn.Module)):
        return table.get(id(value), value)
    if isinstance(value, MethodType) and id(value.__self__) in table:
        return MethodType(value.__func__, table[id(value.__self__)])
    if isinstance(value, StandIn):
        moved = shallow.copy(value)
        moved.module, moved.before = table[id(value.module)], _translated(value.before, table)
        return moved
    if type(value) not in _CONTAINERS or len(value) > _LONG:
        return value
    if type(value) is dict:
        return {key: _translated(entry, table) for key, entry in value.items()}
    return type(value)(_translated(entry, table) for entry in value)


def _state(part: nn.Module) -> dict[str, Any]:
    """What a forward pass may set: attributes, and tensors by their names."""
    attributes = {name: value for name, value in part.__dict__.items() if name not in TENSORS_AND_CHILDREN}
    containers = {
        n: shallow.copy(v) if type(v) in _CONTAINERS and len(v) <= _LONG else v for n, v in attributes.items()
    }
    return {**containers, **buffers_in(part)}


def _set(part: nn.Module, name: str, value: Any) -> None:
    if name in (buffers := buffers_in(part)):
        buffers[name] = value
    else:
        part.__dict__[name] = value


def _alike(one: Any, other: Any, by_identity: bool = False) -> bool:
    """Whether two values are the same; by_identity: tensors must be the same object."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return not by_identity and one.shape == other.shape and bool(torch.equal(one.to(other.device), other))
    if type(one) is dict:
        return one.keys() == other.keys() and all(_alike(one[key], other[key], by_identity) for key in one)
    if type(one) in (list, tuple, deque):
        return len(one) == len(other) and all(_alike(a, b, by_identity) for a, b in zip(one, other, strict=True))
    if isinstance(one, (MethodType, StandIn, nn.Module)):
        return not by_identity  # each copy's own
    try:
        return bool(one == other)
    except Exception:
        return False
