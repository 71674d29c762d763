"""What stands in the place of a module's `forward`: an attribute of the module itself, not a wrapper around it.

It is no hook either: scripts list hooks. A copy of the module has its own, by copy and pickle alike.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn


class ReplacedForward:
    """Called instead of the forward pass of `module`. before: what stood there, if not the pass of its class."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = module.__dict__.get("forward")
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    @property
    def original(self) -> Any:
        """The forward pass that this one stands for."""
        return self.before or partial(type(self.module).forward, self.module)  # which Dynamo of torch 2.10 traces

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)


def restore_forwards(module: nn.Module) -> None:
    """Leave `module` the forward pass that it had of its own, or of another library."""
    while isinstance(now := module.__dict__.get("forward"), ReplacedForward):
        del module.forward
        if now.before is not None:
            module.forward = now.before
