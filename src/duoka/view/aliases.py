"""Within one share's run of a module, its aliases of parameters stand for these, wherever they are used.

A parameter that is used under its own name would be given the gradients of all shares in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OF_ITSELF = frozenset({"__set__", "__delete__", "requires_grad_", "register_hook"})


class Aliases(TorchFunctionMode):
    """A context. alias: gives what stands for a leaf that needs a gradient: an alias, or the leaf itself."""

    def __init__(self, alias: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._alias = alias

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.is_grad_enabled() or getattr(func, "__name__", "") in _OF_ITSELF:
            return func(*args, **kwargs or {})
        if kwargs:
            return func(*map(self.standing_for, args), **{name: self.standing_for(kwargs[name]) for name in kwargs})
        return func(*map(self.standing_for, args))

    def standing_for(self, value: Any) -> Any:
        """What stands for a value, or for the parameters in nested lists."""
        if isinstance(value, Tensor):
            return self._alias(value) if value.requires_grad and value.is_leaf else value
        if type(value) in (list, tuple):
            return type(value)(map(self.standing_for, value))
        return value
