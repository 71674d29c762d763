"""Weights moved by one unit in the last place when they are first used: what rounding alone does to a script.

Sums in another order differ in the last place, and so do these runs: what grows out of it in some steps is what
any other order may grow into. Up or down is drawn for each number, from a stream that is nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


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
            wide = tensor.detach().to(torch.float64)
            unit = torch.finfo(tensor.dtype).eps
            tensor.data.copy_((wide + (2 * up - 1) * unit * wide.abs()).to(tensor.dtype))
