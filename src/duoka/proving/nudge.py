"""Weights moved by one unit in the last place when they are first used: what rounding alone does to a script.

Sums in another order differ in the last place, and so do these runs: what grows out of it in some steps is what
any other order may grow into. Up or down is drawn for each number, from a stream that is nobody else's.

The last place is that of the type in which a model computes (autocast, TF32): a smaller move would be rounded away.
Of so coarse a type only some weights are moved, as an order of addition changes only some results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FINE = 2.0**-20  # types whose last place is no larger have all their weights moved
SOME = 1 / 16  # of the weights, of all other types
TF32 = 2.0**-10


class Nudge:
    """Moves every parameter once. seed: of the directions."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._moved: dict[int, Tensor] = {}  # by id, and alive, so that no other gets that id

    def install(self) -> None:
        """Move a model's parameters when it is first called."""
        nn.Module.__call__ = self._make(nn.Module.__call__)  # type: ignore[method-assign]

    def _make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.move(module.parameters())
            return original(module, *args, **kwargs)

        return __call__

    @torch.no_grad()
    def move(self, tensors: Iterable[Tensor]) -> None:
        """Move those that were not moved yet. Zero stays zero."""
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
    """The last place of 1 in the type in which this parameter is computed with now."""
    device, unit = tensor.device.type, torch.finfo(tensor.dtype).eps
    if torch.is_autocast_enabled(device):
        unit = max(unit, torch.finfo(torch.get_autocast_dtype(device)).eps)
    if device == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        unit = max(unit, TF32)
    return unit
