"""Running a module without leaving a trace: attributes and random states are put back."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Container, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from duoka.private.torch import AnyBatchNorm as _BatchNorm
from duoka.view.draws import random_states, set_random_states
from duoka.view.site import is_users

_MODULE_S_OWN = frozenset(nn.Module().__dict__)
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type, torch.dtype, torch.device, Tensor, nn.Module)
_NAMED = ("_parameters", "_buffers", "_modules")
_PLAIN = (int, float, complex, str, bytes, bool)
_CONTAINERS = (dict, list, set, deque)
_LONG = 1000  # entries of a container that is not looked through
_LARGE = 1 << 20  # entries of an array that is not copied
_DEPTH = 4  # how far objects in attributes are followed


class Remains:
    """What a run of the module has left in its attributes, before it is put back."""

    def __init__(self, module: nn.Module, variables: list[_Space]) -> None:
        self._module, self._variables = module, variables

    def holds(self, tensors: Container[Any]) -> str:
        """The name of an attribute or variable in which one of these tensors was left; "" if none."""
        for name, value in self._places():
            if any(leaf in tensors for leaf in _leaves(value, Tensor, _DEPTH)):
                return name
        return ""

    def values(self) -> list[Any]:
        """The numbers and texts in the attributes, and in the script's global variables."""
        return [leaf for _, value in self._places() for leaf in _leaves(value, _PLAIN, _DEPTH)]

    def everything(self) -> list[Any]:
        """The same, and the tensors."""
        return [leaf for _, value in self._places() for leaf in _leaves(value, (*_PLAIN, Tensor), _DEPTH)]

    def _places(self) -> Iterator[tuple[str, Any]]:
        for path, part in self._module.named_modules():
            for name, value in (*part.__dict__.items(), *part._buffers.items(), *part._parameters.items()):
                if name not in _MODULE_S_OWN:
                    yield f"{path}.{name}".lstrip("."), value
        for space in self._variables:
            for name, value in space.items():
                if _is_data(name, value):
                    yield name, value


@contextmanager
def traceless(module: nn.Module) -> Iterator[Remains]:
    """Run the module inside of this. Its attributes are copies meanwhile; BatchNorm is set aside (evaluation).

    What is written into tensors is not put back here.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]
    parts = [(part, dict(part.__dict__)) for part in module.modules()]
    states = random_states()
    copies: dict[int, Any] = {id(part): part for part, _ in parts}  # an object that calls the module calls this one
    for part, before in parts:
        fresh = {name: _copied(value, copies) for name, value in before.items() if name not in _MODULE_S_OWN}
        part.__dict__.update(fresh, **{name: before[name].copy() for name in _NAMED})
    for norm in norms:
        norm.training = False
    spaces = _variables(module)
    variables = [_Variables(space) for space in spaces]
    try:
        yield Remains(module, spaces)
    finally:
        for part, before in parts:
            part.__dict__.clear()
            part.__dict__.update(before)
        for norm in norms:
            norm.training = True
        for kept in variables:
            kept.put_back()
        set_random_states(states)


def same_things(ones: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold equal numbers and texts, and the very same tensors."""
    return len(ones) == len(others) and all(
        one is other if isinstance(one, Tensor) or isinstance(other, Tensor) else one == other or one != one
        for one, other in zip(ones, others, strict=True)
    )


class _Variables:
    """The variables of a module of the script's, or of a function around one of its own, as far as they are data."""

    def __init__(self, space: _Space) -> None:
        self._space, self._before = space, dict(space.items())
        containers = [name for name, value in space.items() if type(value) in _CONTAINERS and _is_data(name, value)]
        self._entries = {name: space[name].copy() for name in containers}

    def put_back(self) -> None:
        """Make them, and what was in them, what they were."""
        for name, value in list(self._space.items()):
            if name in self._before and value is not self._before[name]:
                self._space[name] = self._before[name]
            elif name not in self._before and _is_data(name, value):
                del self._space[name]
        for name, entries in self._entries.items():
            value = self._before[name]
            if list(map(id, _flat(value))) != list(map(id, _flat(entries))):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(entries)


class _Cells:
    """The variables that a function has of the functions around it."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def items(self) -> list[tuple[str, Any]]:
        return [(name, cell.cell_contents) for name, cell in self._cells.items() if cell != CellType()]

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents


_Space = dict[str, Any] | _Cells


def _variables(module: nn.Module) -> list[_Space]:
    """The variables beside a module: global ones, and those of functions in which its own are defined."""
    functions = dict.fromkeys(
        value
        for part in module.modules()
        for space in (vars(part), *map(vars, type(part).__mro__))
        for value in space.values()
        if isinstance(value, FunctionType) and value.__closure__ and is_users(value.__code__.co_filename)
    )
    return [*_globals(), *map(_Cells, functions)]


def _globals() -> list[dict[str, Any]]:
    """The global variables of the script and of the modules beside it."""
    modules = [module for module in list(sys.modules.values()) if type(module) is ModuleType]
    return [vars(module) for module in modules if is_users(getattr(module, "__file__", None) or "<string>")]


def _is_data(name: str, value: Any) -> bool:
    """A number, a text, or a container that is small enough to look through."""
    return not name.startswith("__") and (
        isinstance(value, _PLAIN) or (type(value) in _CONTAINERS and len(value) <= _LONG)
    )


def _flat(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


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
            made = copy.deepcopy(value, copies)
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
