"""Reading tensors into Python: inside of a boundary, what is read must be the same on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from duoka.plain.session import Session
from duoka.view.boundary import Boundary

READING = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__")


class _Watched:
    """A method of Tensor. It leaves no frame behind: what torch warns of is told of the caller's line."""

    def __init__(self, original: Any, boundary: Boundary) -> None:
        self._original, self._boundary = original, boundary

    def __get__(self, tensor: Tensor | None, kind: type[Tensor]) -> Any:
        if tensor is None:
            return self._original
        method = self._original.__get__(tensor, kind)
        return method if self._boundary.inside is None else partial(self._boundary.read, method)


def install(session: Session) -> None:
    """Watch the methods of Tensor that give Python values."""
    for name in READING:
        session.patches.put(Tensor, name, _Watched(getattr(Tensor, name), session.boundary))
