"""Models that compute in 16 bits: autocast within the forward pass, without changing the model."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from duoka.options import one_of
from duoka.run.scaling import GradientScale
from duoka.view.modules.replaced_forward import ReplacedForward
from duoka.view.tensor.contents import Contents

Precision = Literal["32", "bf16", "fp16"]
DTYPES = {"32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHORT = (torch.bfloat16, torch.float16)


class AutocastForward(ReplacedForward):
    """A forward pass under autocast that returns float32. scale: of gradients within it, for float16."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype, scale: GradientScale | None) -> None:
        super().__init__(module)
        self.device_type, self.dtype, self.scale = device_type, dtype, scale

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.scale is not None and torch.is_grad_enabled():
            return self.scale.around(self._short, self.module, args, kwargs)
        return self._short(*args, **kwargs)

    def _short(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype):
            output = self.original(*args, **kwargs)
        if isinstance(output, Tensor):
            return _lengthened(output)
        contents = Contents(output)
        return contents.put([_lengthened(leaf) for leaf in contents.leaves])


def _lengthened(leaf: Any) -> Any:
    """Convert 16-bit tensors to float32, as losses are sums of many terms."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in SHORT else leaf


def check_precision(precision: Any) -> None:
    """Check an option value.

    Raises:
        OptionError: it is not allowed.
    """
    one_of("precision", precision, DTYPES)


def set_precision(
    module: nn.Module, precision: Precision, device: torch.device, scale: GradientScale | None = None
) -> None:
    """Let `module` compute in this precision. scale: for fp16."""
    if precision != "32":
        AutocastForward(module, device.type, DTYPES[precision], scale)
