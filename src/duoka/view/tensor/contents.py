"""Tensors and other leaves in nested containers and in the attributes of objects."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from duoka.private.torch import tree_flatten, tree_unflatten

_DEPTH = 5  # of objects in objects
_LEAVES = (Tensor, nn.Module, Enum, torch.Generator, dict, list, tuple, set)


class Contents:
    """The leaves of nested containers and of the objects in them; `put` replaces them.

    Objects are changed in place. An object's leaves are preceded by one with its type and attribute names.
    """

    def __init__(self, value: Any, depth: int = _DEPTH) -> None:
        self.leaves: list[Any] = []
        top, self._tree = tree_flatten(value)
        self._objects: list[tuple[Any, list[str], Contents] | None] = []
        for leaf in top:
            names = _attributes(leaf) if depth else []
            if not names:
                self._objects.append(None)
                self.leaves.append(leaf)
                continue
            inner = Contents([getattr(leaf, name) for name in names], depth - 1)
            self._objects.append((leaf, names, inner))
            self.leaves += [(type(leaf), *names), *inner.leaves]

    def put(self, leaves: list[Any]) -> Any:
        """Return the value with these leaves instead of its own."""
        return self._put(iter(leaves))

    def _put(self, leaves: Iterator[Any]) -> Any:
        parts = []
        for entry in self._objects:
            leaf = next(leaves)
            if entry is not None:
                leaf, names, inner = entry
                for name, value in zip(names, inner._put(leaves), strict=True):
                    object.__setattr__(leaf, name, value)  # frozen dataclasses too
            parts.append(leaf)
        return tree_unflatten(parts, self._tree)


def _attributes(value: Any) -> list[str]:
    """Return the names of an object's attributes; empty for a leaf."""
    if isinstance(value, _LEAVES) or callable(value) or type(value).__module__ in ("builtins", "numpy", "torch"):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*(name for name in slots if name[:2] != "__" and hasattr(value, name)), *getattr(value, "__dict__", ())]
