"""Operations of a script on sharded parameters outside of their model, with the results of one device.

torch's DTensor computes many of them on this rank's part only; here they are computed on all parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duoka.checkpoint.stored import part_of
from duoka.errors import Refused
from duoka.plain.patching import Patches
from duoka.private.torch import tree_leaves
from duoka.view.collectives.base import Collectives
from duoka.view.random.draws import FILLING
from duoka.view.support.kinds import is_sharded
from duoka.view.support.user_code import user_line
from duoka.view.tensor.graph import graph

READING = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")
_LIKE = ("rand_like", "randn_like", "randint_like")
_ADDING = ("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "add", "sub")
_SHARDED_NODE = "RegisterPostBackwardFunctionBackward"  # torch's, of a sharded part whose inputs ask for gradients
_TWICE = (
    "{} differentiates twice (create_graph=True) beside a model of strategy='fsdp', whose parameters are gone by "
    "then; use strategy='auto' for that model"
)


def install(patches: Patches, ranks: Collectives) -> None:
    """Intercept how tensors are read, filled with random numbers, added and differentiated."""
    for name in (*READING, "__format__"):
        patches.put(Tensor, name, _ReadWhole(getattr(Tensor, name), ranks))
    for name in (*FILLING, "bernoulli_"):
        patches.replace(Tensor, name, _filling_whole)
    for name in _LIKE:
        patches.replace(torch, name, _drawing_whole)
    for name in _ADDING:
        patches.replace(Tensor, name, _adding)
    patches.replace(torch.autograd, "grad", _refusing_grad)
    patches.replace(torch.autograd, "backward", _refusing_backward)


class _ReadWhole:
    """A method of Tensor that reads it into Python, for sharded tensors from all parts. All ranks call it."""

    def __init__(self, original: Any, ranks: Collectives) -> None:
        self._original, self._ranks = original, ranks

    def __get__(self, tensor: Any, kind: type[Tensor]) -> Any:
        if tensor is None:
            return self._original
        if is_sharded(tensor):
            self._ranks.begin_native("read")
            tensor = tensor.full_tensor()
            self._ranks.end_native()
        return self._original.__get__(tensor, type(tensor))


def _filling_whole(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Draw the random numbers of the whole tensor, as one device does, and keep this rank's part."""

    def fill(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_sharded(self):
            return original(self, *args, **kwargs)
        with torch.no_grad():
            return self.copy_(part_of(original(_empty(self), *args, **kwargs), self))

    return fill


def _drawing_whole(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Do the same for functions that create a tensor like another."""

    def draw(like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_sharded(like):
            return original(like, *args, **kwargs)
        return part_of(original(_empty(like), *args, **kwargs), like)

    return draw


def _empty(sharded: Any) -> Tensor:
    return torch.empty(sharded.shape, dtype=sharded.dtype, device=sharded.to_local().device)


def _adding(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Add a number computed from sharded parameters, such as a penalty on weights, to a plain one."""

    def add(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(other, Tensor) and is_sharded(self) != is_sharded(other):
            self, other = _number(self), _number(other)
        return original(self, other, *args, **kwargs)

    return add


def _number(value: Any) -> Any:
    return value.full_tensor() if value.dim() == 0 and is_sharded(value) else value


def _refusing_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    """Intercept `torch.autograd.grad`: raise an error where the sharded parameters do not allow it."""

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, Tensor) and is_sharded(one) for one in tree_leaves(inputs)):
            raise Refused(
                f"{user_line()} asks torch.autograd.grad for the gradient of a sharded parameter; loss.backward() "
                "gives it, in its .grad"
            )
        create_graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        if create_graph and _leads_through_shards(outputs):
            raise Refused(_TWICE.format(user_line()))
        return original(outputs, inputs, *args, **kwargs)

    return grad


def _refusing_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Intercept `torch.autograd.backward`, likewise."""

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("create_graph", args[2] if len(args) > 2 else False):
            raise Refused(_TWICE.format(user_line()))
        return original(tensors, *args, **kwargs)

    return backward


def _leads_through_shards(outputs: Any) -> bool:
    return any(node.name() == _SHARDED_NODE for node in graph(tree_leaves(outputs)))
