"""Move weights by one unit in the last place when they are first used, to measure how a script amplifies rounding.

Another order of addition changes the last place, too, so such a run bounds what rounding may do. Directions are drawn
from a separate random stream.

The last place is that of the type in which a model computes (autocast, TF32): a smaller change would be rounded away.
For such coarse types only some weights are moved, as another order of addition changes only some results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FINE = 2.0**-20  # types with a smaller unit in the last place have all weights moved
SOME = 1 / 16  # of the weights, of all other types
TF32 = 2.0**-10


class Nudge:
    """Moves every parameter once. seed: of the directions."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._moved: dict[int, Tensor] = {}  # by id; kept alive, so that no other tensor gets the id

    def install(self) -> None:
        """Hook module calls, to move a model's parameters at its first call."""
        nn.Module.__call__ = self._make(nn.Module.__call__)  # type: ignore[method-assign]

    def _make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.move(module.parameters())
            return original(module, *args, **kwargs)

        return __call__

    @torch.no_grad()
    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move the tensors that were not moved yet. Zero stays zero."""
        for tensor in tensors:
            if id(tensor) in self._moved or not tensor.is_floating_point():
                continue
            self._moved[id(tensor)] = tensor
            up = torch.from_numpy(self._draw.integers(0, 2, tuple(tensor.shape), dtype=np.int8)).to(tensor.device)
            unit, sign = _unit(tensor), 2 * up - 1
            if unit > FINE:
                sign *= torch.from_numpy(self._draw.random(tuple(tensor.shape)) < SOME).to(tensor.device)
            wide = tensor.detach().to(torch.float64)
            tensor.data.copy_((wide + sign * unit * wide.abs()).to(tensor.dtype))


def _unit(tensor: Tensor) -> float:
    """Return the unit in the last place of 1, in the type in which this parameter is used now."""
    device, unit = tensor.device.type, torch.finfo(tensor.dtype).eps
    if torch.is_autocast_enabled(device):
        unit = max(unit, torch.finfo(torch.get_autocast_dtype(device)).eps)
    if device != "cpu" and (torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"):
        unit = max(unit, TF32)
    return unit
