"""Names of functions that the user says compute each row by itself: `--row-independent NAME,...`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))  # with overloads; an overload


class RowIndependent:
    """The names that the user gave. unused: names of functions that were not called with a batch so far."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self.unused = set(self._names)

    def name_of(self, names: Iterable[str]) -> str | None:
        """Return the first of a function's names that the user gave."""
        name = next((name for name in names if name in self._names), None) if self._names else None
        self.unused.discard(name or "")
        return name


def names_of_class(kind: type) -> tuple[str, ...]:
    """Return the names of a class: `Scan`, `Outer.Scan`, `train.Outer.Scan`."""
    return kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"


def names_of_module(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's class; of a scripted module, the name of the class that was scripted."""
    original = getattr(module, "original_name", None)
    return (original,) if original else names_of_class(type(module))


def names_of_operator(func: Any) -> tuple[str, ...]:
    """Return the name of an operator, `mylib::square`, from that of its overload, `mylib.square.default`."""
    return ("::".join(str(func).split(".")[:2]),)
