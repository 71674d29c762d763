"""Replace the forward method of a module by an attribute of the module.

A wrapper would change the module's type and the names of its parameters, and scripts may list hooks. Copies of the
module, by `copy` and `pickle`, have a replacement of their own.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn


class ReplacedForward:
    """Called instead of `module.forward`. before: the attribute that it replaced; None for the class's method."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = module.__dict__.get("forward")
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    @property
    def original(self) -> Any:
        """The replaced forward method."""
        return self.before or partial(type(self.module).forward, self.module)  # which Dynamo of torch 2.10 traces

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)


def restore_forwards(module: nn.Module) -> None:
    """Restore the forward method that `module` had before duoka replaced it."""
    while isinstance(now := module.__dict__.get("forward"), ReplacedForward):
        del module.forward
        if now.before is not None:
            module.forward = now.before
