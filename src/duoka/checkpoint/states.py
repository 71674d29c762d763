"""The states of a checkpoint, by kind: conversion to tensors and JSON, and back.

model       nn.Module: tensors under the model's own names, as `save_weights` writes them
optimizer   its state by the parameters' names, so that their order and number of groups are checked
object      anything with state_dict() and load_state_dict(): schedulers, scalers, loaders, averages
tensor      restored in place
container   a list, dict or set: restored in place
value       numbers and strings, which cannot be changed in place: see `Checkpoint.values`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from duoka import accelerator
from duoka.checkpoint.directory import OWN_FILE
from duoka.checkpoint.formats import Stored, part_of
from duoka.checkpoint.saving import part_or_whole, plain_names, plain_state, whole
from duoka.checkpoint.sharded import holders
from duoka.checkpoint.values import join, split
from duoka.errors import CheckpointError, WeightsError
from duoka.private.torch import set_stepped, tree_map_only
from duoka.view.collectives.base import Collectives


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
                return SavedState(kind, plain_state(thing, part_or_whole), has_tree=False)
            state = thing.state_dict() if kind in ("model", "optimizer", "object") else thing
            if kind == "optimizer":
                state = by_name(state, self._names(thing))
            tree, tensors = split(state, "" if kind in OWN_FILE else name)
        except (CheckpointError, WeightsError) as error:
            raise CheckpointError(f"{name!r} cannot be saved: {error}") from error
        taken = part_or_whole if kind in OWN_FILE else whole
        return SavedState(kind, {key: taken(tensor) for key, tensor in tensors.items()}, tree)

    def restore(self, name: str, tree: Any, tensors: Mapping[str, Tensor | Stored]) -> Any:
        """Restore a state, and return its value as saved. tensors: of models and optimizers may still be in files."""
        try:
            thing, state = self.objects[name], join(tree, tensors)
        except Exception as error:  # data of another program may be of any form
            raise CheckpointError(f"the saved state of {name!r} is invalid: {error!r}") from error
        kind = self.kinds[name]
        if kind == "model":
            thing.load_state_dict(_read_like(state, thing.state_dict()))
        elif kind == "optimizer":
            thing.load_state_dict(sharded(by_index(state, self._names(thing), name), thing))
            set_stepped(thing, bool(state["state"]))  # for schedulers, which warn of a missing step
        elif kind == "object":
            thing.load_state_dict(state)
        elif kind == "tensor":
            with torch.no_grad():
                thing.copy_(state)
        elif kind == "container":
            _refill(thing, state, name)
        return state

    def _names(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """Return the names of an optimizer's parameters, by group; parameters of no model are numbered."""
        known: dict[int, str] = {}
        for at, model in self.objects.items():
            if isinstance(model, nn.Module):
                own = plain_names(model)
                state = model.state_dict(keep_vars=True)
                known |= {id(value): f"{at}.{own[name]}" for name, value in state.items()}
        number = count()
        return [
            [known.get(id(parameter), f"#{next(number)}") for parameter in group["params"]]
            for group in optimizer.param_groups
        ]


def by_name(state: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Replace indices by names in an optimizer's state dict."""
    flat = [name for group in names for name in group]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    called = dict(zip(numbers, flat, strict=True))
    return {
        **state,
        "state": {called.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": list(own)} for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }


def by_index(state: Mapping[str, Any], names: list[list[str]], optimizer: str) -> dict[str, Any]:
    """Replace names by indices, in the optimizer's present order of parameters.

    Raises:
        CheckpointError: it has other groups, or other parameters in them.
    """
    groups = state["param_groups"]
    if len(groups) != len(names):
        raise CheckpointError(
            f"{optimizer!r} has {len(names)} groups of parameters, and was saved with {len(groups)}"
        )
    for number, (group, own) in enumerate(zip(groups, names, strict=True)):
        more, fewer = sorted(set(own) - set(group["params"])), sorted(set(group["params"]) - set(own))
        if more or fewer:
            raise CheckpointError(
                f"group {number} of {optimizer!r} has other parameters than were saved: "
                f"now {', '.join(more[:5]) or 'none'}, then {', '.join(fewer[:5]) or 'none'}"
            )
    index = {name: number for number, name in enumerate(name for own in names for name in own)}
    return {
        **state,
        "state": {index.get(name, name): value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [index[name] for name in own]} for group, own in zip(groups, names, strict=True)
        ],
    }


def sharded(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Shard the tensors of a state dict like the parameters they belong to."""
    parameters = dict(enumerate(it for group in optimizer.param_groups for it in group["params"]))

    own = {
        index: _read_like(kept, dict.fromkeys(kept, parameters.get(index))) for index, kept in state["state"].items()
    }
    return {**state, "state": own, "param_groups": _read(state["param_groups"])}


def _read_like(values: Mapping[str, Any], likes: Mapping[str, Any]) -> dict[str, Any]:
    """Read what is still in files, and shard what has the shape of its sharded tensor in `likes`."""

    def part(value: Any, like: Any) -> Any:
        if isinstance(like, Tensor) and tuple(getattr(value, "shape", ())) == tuple(like.shape):
            return value.read_like(like) if isinstance(value, Stored) else part_of(value, like)
        return _read(value)

    return {name: part(value, likes.get(name)) for name, value in values.items()}


def _read(tree: Any) -> Any:
    return tree_map_only(Stored, lambda stored: stored.read(), tree)


def _refill(thing: Any, state: Any, name: str) -> None:
    if type(state) is not type(thing):
        raise CheckpointError(f"{name!r} is a {type(thing).__name__}, but was saved as a {type(state).__name__}")
    thing.clear()
    fill: Callable[[Any], None] = thing.extend if isinstance(thing, list) else thing.update
    fill(state)
