"""Models that compute in 16 bits: autocast within the forward pass, so that the model stays what it is."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from duoka.errors import OptionError
from duoka.view.contents import Contents

Precision = Literal["32", "bf16"]
SHORT = (torch.bfloat16, torch.float16)


class ShortForward:
    """What stands in the place of a module's `forward`. A copy of the module has its own, by copy and pickle alike.

    It is no hook: hooks see what goes in and out, so a module that has one is opened at the boundary.
    """

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        self.module, self.device_type, self.dtype = module, device_type, dtype
        self.before = module.__dict__.get("forward")  # another library's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype):
            output = self.original(*args, **kwargs)
        if isinstance(output, Tensor):
            return _lengthened(output)
        contents = Contents(output)
        return contents.put([_lengthened(leaf) for leaf in contents.leaves])

    @property
    def original(self) -> Any:
        """The forward pass of the module itself."""
        return self.before or type(self.module).forward.__get__(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)


def _lengthened(leaf: Any) -> Any:
    """Float32, as losses are sums of many."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in SHORT else leaf


def check_precision(precision: Any) -> None:
    """See that it can be had.

    Raises:
        OptionError: it cannot.
    """
    if precision in ("32", "bf16"):
        return
    hint = "torch.autocast and torch.amp.GradScaler in your loop work as on one device" if precision == "fp16" else ""
    raise OptionError("precision", precision, "'32' or 'bf16'", hint)


def set_precision(module: nn.Module, precision: Precision, device: torch.device) -> None:
    """Let `module` compute in this precision, whatever it did before."""
    now = module.__dict__.get("forward")
    if isinstance(now, ShortForward):
        del module.forward
        if now.before is not None:
            module.forward = now.before
    if precision == "bf16":
        module.forward = ShortForward(module, device.type, torch.bfloat16)
