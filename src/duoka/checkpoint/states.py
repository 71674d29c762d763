"""The states of a checkpoint, by kind: conversion to tensors and JSON, and back.

model       nn.Module: tensors under the model's own names, as `save_weights` writes them
optimizer   its state by the parameters' names, so that their order and number of groups are checked
object      anything with state_dict() and load_state_dict(): schedulers, scalers, loaders, averages
tensor      restored in place
container   a list, dict or set: restored in place
value       numbers and strings, which cannot be changed in place: see `Checkpoint.values`

No pickle is written, and no code runs on reading. Types that JSON lacks are an object with one key that begins with
"$": {"$tuple": [1, 2]}. A tensor is {"$tensor": NAME}, where NAME is its name in a safetensors file.
"""

from __future__ import annotations

import base64
import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from duoka.checkpoint.directory import OWN_FILE
from duoka.checkpoint.formats import Stored
from duoka.checkpoint.saving import gathered, plain_names, plain_state, sharded_or_gathered
from duoka.checkpoint.sharded import holders
from duoka.collectives.base import Collectives
from duoka.errors import CheckpointError, WeightsError
from duoka.hardware import accelerator
from duoka.private.torch import set_stepped, tree_map_only

DEEPEST = 100  # levels of nesting


@dataclass(frozen=True)
class SavedState:
    """A state as tensors and JSON. tree: the JSON, if there is more than tensors.

    Tensors of models and optimizers may be sharded ones (`sharded.py`); all others are whole on rank 0.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    tree: Any = None
    has_tree: bool = True

    @property
    def holders(self) -> Collectives | None:
        """The ranks that hold its parts, each of which writes some tensors; None if no tensor is sharded."""
        return holders(self.tensors.values())


class RandomGenerators:
    """The random generators of python, numpy and torch, on the CPU and on the current GPU."""

    def state_dict(self) -> dict[str, Any]:
        state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        state["torch"] = torch.get_rng_state()
        if module := accelerator.in_use():
            state[accelerator.kind()] = module.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generators; the GPU's only if it was saved and there is one."""
        try:
            random.setstate(state["python"])
            np.random.set_state(state["numpy"])
            torch.set_rng_state(state["torch"])
            if accelerator.kind() in state and torch.accelerator.is_available():
                accelerator.module().set_rng_state(state[accelerator.kind()])
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved random state is invalid: {error!r}") from error


def kind_of(thing: Any) -> str:
    """Return the kind of a state."""
    if isinstance(thing, nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return "object"
    if isinstance(thing, Tensor):
        return "tensor"
    return "container" if type(thing) in (list, dict, set) else "value"


class States:
    """The states of a checkpoint, by name."""

    def __init__(self, things: Mapping[str, Any]) -> None:
        self.objects = dict(things)
        self.kinds = {name: kind_of(thing) for name, thing in things.items()}

    def to_saved(self) -> dict[str, SavedState]:
        """Convert all states. Tensors are not copied: copy them before training continues."""
        return {name: self._to_saved(name, thing) for name, thing in self.objects.items()}

    def _to_saved(self, name: str, thing: Any) -> SavedState:
        kind = self.kinds[name]
        try:
            if kind == "model" and all(isinstance(value, Tensor) for value in thing.state_dict().values()):
                return SavedState(kind, plain_state(thing), has_tree=False)
            state = thing.state_dict() if kind in ("model", "optimizer", "object") else thing
            if kind == "optimizer":
                state = _by_name(state, self._names(thing))
            tree, tensors = split(state, "" if kind in OWN_FILE else name)
        except (CheckpointError, WeightsError) as error:
            raise CheckpointError(f"{name!r} cannot be saved: {error}") from error
        take = sharded_or_gathered if kind in OWN_FILE else gathered
        return SavedState(kind, {key: take(tensor) for key, tensor in tensors.items()}, tree)

    def restore(self, name: str, tree: Any, tensors: Mapping[str, Stored]) -> Any:
        """Restore a state, and return its value as saved. tensors: by their path in the tree."""
        thing, kind = self.objects[name], self.kinds[name]
        try:
            # Of models and optimizers each tensor is read when it is copied: there is no second one in memory.
            state = join(tree, tensors, reads=kind not in OWN_FILE)
        except Exception as error:  # data of another program may be of any form
            raise CheckpointError(f"the saved state of {name!r} is invalid: {error!r}") from error
        if kind == "model":
            thing.load_state_dict(_read_like(state, thing.state_dict()))
        elif kind == "optimizer":
            thing.load_state_dict(_read_like_parameters(_by_index(state, self._names(thing), name), thing))
            set_stepped(thing, bool(state["state"]))  # for schedulers, which warn of a missing step
        elif kind == "object":
            thing.load_state_dict(state)
        elif kind == "tensor":
            with torch.no_grad():
                thing.copy_(state)
        elif kind == "container":
            if type(state) is not type(thing):
                was = type(state).__name__
                raise CheckpointError(f"{name!r} is a {type(thing).__name__}, but was saved as a {was}")
            thing.clear()  # in place: the script holds this object
            (thing.extend if isinstance(thing, list) else thing.update)(state)
        return state

    def _names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of an optimizer's parameters, by group; parameters of no model are numbered."""
        known: dict[int, str] = {}
        for key, model in self.objects.items():
            if isinstance(model, nn.Module):
                names = plain_names(model)
                state = model.state_dict(keep_vars=True)  # the parameters themselves, which the optimizer has
                known |= {id(value): f"{key}.{names[name]}" for name, value in state.items()}
        number = count()
        return [
            [known.get(id(parameter), f"#{next(number)}") for parameter in group["params"]]
            for group in optimizer.param_groups
        ]


def _by_name(state: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Replace indices by names in an optimizer's state dict."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    called = dict(zip(numbers, (name for group in names for name in group), strict=True))
    return _renamed(state, called, names)


def _by_index(state: Mapping[str, Any], names: list[list[str]], optimizer: str) -> dict[str, Any]:
    """Replace names by indices, in the optimizer's present order of parameters.

    Raises CheckpointError if it has other groups, or other parameters in them.
    """
    groups = state["param_groups"]
    if len(groups) != len(names):
        raise CheckpointError(
            f"{optimizer!r} has {len(names)} groups of parameters, and was saved with {len(groups)}"
        )
    for number, (group, now) in enumerate(zip(groups, names, strict=True)):
        more, fewer = sorted(set(now) - set(group["params"])), sorted(set(group["params"]) - set(now))
        if more or fewer:
            raise CheckpointError(
                f"group {number} of {optimizer!r} has other parameters than were saved: "
                f"now {', '.join(more[:5]) or 'none'}, then {', '.join(fewer[:5]) or 'none'}"
            )
    index = {name: number for number, name in enumerate(name for group in names for name in group)}
    return _renamed(state, index, [[index[name] for name in group] for group in names])


def _renamed(state: Mapping[str, Any], keys: Mapping[Any, Any], parameters: list[list[Any]]) -> dict[str, Any]:
    groups = zip(state["param_groups"], parameters, strict=True)
    return {
        **state,
        "state": {keys.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": list(params)} for group, params in groups],
    }


def _read_like_parameters(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    kept = {
        index: _read_like(values, dict.fromkeys(values, parameters.get(index)))
        for index, values in state["state"].items()
    }
    return {**state, "state": kept, "param_groups": _read(state["param_groups"])}


def _read_like(values: Mapping[str, Any], likes: Mapping[str, Any]) -> dict[str, Any]:
    """Read what is still in files, and shard what has the shape of its sharded tensor in `likes`."""

    def part(value: Any, like: Any) -> Any:
        is_alike = isinstance(value, Stored) and isinstance(like, Tensor) and value.shape == tuple(like.shape)
        return value.read_like(like) if is_alike else _read(value)

    return {name: part(value, likes.get(name)) for name, value in values.items()}


def _read(tree: Any) -> Any:
    return tree_map_only(Stored, lambda stored: stored.read(), tree)


# Values as JSON and tensors.


def split(value: Any, at: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Split a value into JSON and its tensors, by their path in it.

    Raises CheckpointError if it contains an object that only code can restore: a function, or an instance of a class.
    """
    tensors: dict[str, Tensor] = {}
    return _split(value, at, tensors, 0), tensors


def _split(value: Any, at: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if depth > DEEPEST:
        raise CheckpointError(f"{at[:80]}… is nested deeper than {DEEPEST} levels, or contains itself")

    def inner(part: Any, name: object) -> Any:
        return _split(part, f"{at}.{name}" if at else str(name), tensors, depth + 1)

    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value, at, tensors)}
    if kind is list:
        return [inner(part, number) for number, part in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):  # else "$dict", below
        return {key: inner(part, key) for key, part in value.items()}
    if isinstance(value, np.ndarray) and str(value.dtype) in _ARRAYS:
        return {"$array": _keep(torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape), at, tensors)}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if isinstance(value, np.generic) and str(value.dtype) in _ARRAYS:
        return {"$scalar": [str(value.dtype), base64.b64encode(value.tobytes()).decode()]}
    for word, (known, take_apart, _) in _TYPES.items():
        if kind is known:
            return {word: inner(take_apart(value), word)}
    raise CheckpointError(
        f"{at or 'a value'} is of type {kind.__module__}.{kind.__qualname__}, which cannot be kept without code; "
        "keep numbers, strings, lists, dicts and tensors, or give its class state_dict() and load_state_dict()"
    )


def _keep(tensor: Tensor, at: str, tensors: dict[str, Tensor]) -> str:
    """Store a tensor under an unused name: two keys, as 1 and "1", can give the same path."""
    name, again = at or "value", 1
    while name in tensors:
        name, again = f"{at or 'value'}~{again}", again + 1
    tensors[name] = tensor.detach()
    return name


def join(tree: Any, tensors: Mapping[str, Stored], reads: bool) -> Any:
    """Rebuild the value. tensors: by their path. reads: reads them; else those of the value are `Stored`."""
    if isinstance(tree, list):
        return [join(item, tensors, reads) for item in tree]
    if not isinstance(tree, dict):
        return tree
    word = next(iter(tree), "")
    if len(tree) == 1 and word.startswith("$"):
        if word == "$tensor":
            return tensors[tree[word]].read() if reads else tensors[tree[word]]
        if word == "$array":
            return tensors[tree[word]].read().numpy()
        return _TYPES[word][2](join(tree[word], tensors, reads))
    return {key: join(value, tensors, reads) for key, value in tree.items()}


_ARRAYS = frozenset(
    {"bool", "float16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def _pairs(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, part] for key, part in value.items()]


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


# word -> (the type, its conversion to JSON, and back)
_TYPES: dict[str, tuple[type | None, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$tuple": (tuple, list, tuple),
    "$size": (torch.Size, list, torch.Size),
    "$dict": (dict, _pairs, dict),
    "$ordered": (OrderedDict, _pairs, OrderedDict),
    "$counter": (Counter, _pairs, lambda pairs: Counter(dict(pairs))),
    "$set": (set, list, set),
    "$frozenset": (frozenset, list, frozenset),
    "$deque": (deque, lambda value: [list(value), value.maxlen], lambda kept: deque(kept[0], kept[1])),
    "$bytes": (bytes, _base64, base64.b64decode),
    "$bytearray": (bytearray, _base64, lambda text: bytearray(base64.b64decode(text))),
    "$complex": (complex, lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "$dtype": (torch.dtype, lambda value: str(value)[6:], lambda name: getattr(torch, name)),
    "$device": (torch.device, str, torch.device),
    # Of these `_split` knows the types.
    "$float": (None, repr, float),
    "$path": (None, str, Path),
    "$scalar": (None, list, lambda kept: np.frombuffer(base64.b64decode(kept[1]), dtype=kept[0])[0]),
}
