"""The mutable state of a dataset: generators, counters and lists that change from one sample to the next.

A rank that reads only its own rows would change it less than one device does. The state is searched in the dataset's
attributes, in objects they hold (transforms, other datasets), and in the variables outside that its code names.
What cannot be compared, such as an iterator, counts as changed.
"""

from __future__ import annotations

import dis
import functools
import inspect
import io
import os
import random
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
from torch import Generator, Tensor, nn

from duoka.private.torch import version_of
from duoka.system.user_code import is_users
from duoka.view.tensor.batch import BatchTensor

_DEPTH = 6  # levels of nesting that are searched
_LONG = 1000  # entries of a list or dict that are compared one by one
_MOST = 20_000  # objects that are searched
_LARGE = 1 << 24  # bytes of an array that is compared
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), range)
_WITHOUT_BATCHES = (*_CONSTANTS, np.ndarray, ModuleType)


class DatasetState:
    """A snapshot of a dataset's state, by the names under which it is found."""

    def __init__(self, dataset: Any) -> None:
        self.generators: list[Any] = []  # random ones, in it
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
        self._values = dict(self._state_in("dataset", dataset, _DEPTH))

    def changed(self, now: DatasetState) -> str | None:
        """Return a name whose value differs in the later snapshot `now`, or None."""
        names = (*now._values, *self._values)
        return next((name for name in names if self._values.get(name, self) != now._values.get(name, self)), None)

    def _state_in(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _CONSTANTS):
            yield name, repr(value) if isinstance(value, float) else value  # nan differs from itself
            return
        state = state_of(value)
        if state is not None:
            self.generators.append(value)
            yield name, state
        elif isinstance(value, io.IOBase):  # a file that is read on from where the last sample has left it
            yield name, _position(value)
        elif isinstance(value, Iterator) and not hasattr(value, "__dict__"):  # Python's own: cycle, a generator
            yield name, object()
        elif isinstance(value, (Tensor, np.ndarray)):
            self._seen[id(value)] = value
            yield name, (id(value), _of_array(value))
        elif depth and id(value) not in self._seen and len(self._seen) < _MOST and not isinstance(value, ModuleType):
            self._seen[id(value)] = value
            for part, held in _held(value):
                if part == "":
                    yield name, held
                else:
                    yield from self._state_in(f"{name}.{part}" if name != "dataset" else part, held, depth - 1)


def batches_held(*holders: Any) -> list[BatchTensor]:
    """Return the batches and sharded parameters that objects hold, searched as `DatasetState` does."""
    batches: list[BatchTensor] = []
    seen: dict[int, Any] = {}
    held = deque((holder, _DEPTH) for holder in holders)
    while held and len(seen) < _MOST:
        value, depth = held.popleft()
        if id(value) in seen or not depth or isinstance(value, _WITHOUT_BATCHES):
            continue
        seen[id(value)] = value  # keeps it alive, so that no id is reused
        if isinstance(value, BatchTensor):
            batches.append(value)
        elif not isinstance(value, Tensor):
            held.extend((part, depth - 1) for _, part in _held(value) if type(part) not in _CONSTANTS)
            held += [(part, 1) for part in value.parameters()] if isinstance(value, nn.Module) else []
    return batches


def state_of(value: Any) -> Any:
    """Return the state of a random generator in a comparable form; None if `value` is not one."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False)["state"])
    if isinstance(value, Generator):
        return value.get_state().numpy().tobytes()
    return None


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object by name; under an empty name, something to compare."""
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        yield "", len(value)
        if len(value) <= _LONG:
            entries = value.values() if isinstance(value, dict) else value
            yield from ((str(number), entry) for number, entry in enumerate(entries))
    elif isinstance(value, types.MethodType):
        yield "of", value.__self__
        yield "by", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _named_in(value)
        yield from ((f"attribute.{name}", held) for name, held in vars(value).items())
    elif isinstance(value, functools.partial):
        yield from (("of", value.func), ("with", value.args), ("and", value.keywords))
    elif isinstance(value, type):
        yield from _of_class(value)
    else:
        yield "", id(value)
        yield from list(getattr(value, "__dict__", {}).items())
        for part in type(value).__mro__:
            if part.__module__ != "builtins":
                yield from ((f"{part.__name__}.{name}", held) for name, held in _of_class(part))
                slots = [name for name, slot in vars(part).items() if inspect.ismemberdescriptor(slot)]
                yield from ((name, getattr(value, name, None)) for name in slots if name != "__dict__")


def _of_class(part: type) -> Iterator[tuple[str, Any]]:
    """Yield the methods of a class of the script, and its class variables."""
    for name, value in list(vars(part).items()):
        if isinstance(value, (staticmethod, classmethod)):
            yield name, value.__func__
        elif (
            hasattr(value, "__wrapped__")  # in a decorator, of a library too
            or (isinstance(value, types.FunctionType) and is_users(value.__code__.co_filename))
            or not (name.startswith("__") or hasattr(type(value), "__get__"))  # which methods and properties have
        ):
            yield name, value


def _named_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables outside of a function that its code names."""
    if not is_users(function.__code__.co_filename):
        yield "wrapped", getattr(function, "__wrapped__", None)  # by a library's decorator (torch.no_grad)
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with_value: Callable[[], Any] = functools.partial(getattr, cell, "cell_contents", None)
        yield name, with_value()
    yield from (("defaults", function.__defaults__), ("defaults by name", function.__kwdefaults__))
    for code in _codes(function.__code__):
        for name in _globals_of(code):
            value = function.__globals__.get(name)
            if isinstance(value, ModuleType) and is_users(getattr(value, "__file__", None) or os.__file__):
                named = [part for part in code.co_names if part in vars(value)]
                yield from ((f"{name}.{part}", vars(value)[part]) for part in named)
            else:
                yield name, value


@functools.lru_cache(maxsize=4096)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of global variables in code; `co_names` has those of attributes, too."""
    named = (each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return tuple(dict.fromkeys(named))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of nested functions."""
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _codes(constant)


def _position(file: io.IOBase) -> Any:
    try:
        return file.tell()
    except (OSError, ValueError):  # of text that is iterated over; of a closed file
        return file.closed or object()


def _of_array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), 0 if value.is_inference() else version_of(value)
    if value.dtype == object or value.nbytes > _LARGE:
        return value.shape
    return value.shape, zlib.crc32(value.tobytes())
