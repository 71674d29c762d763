"""Weights for losses of a rank's own rows (loaders with view="local"): each is a mean over these rows.

The loss is weighted, not the gradient, which may have passed operations over all ranks, such as a BatchNorm of the
whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duoka.plain.patching import Patches
from duoka.private.torch import tree_map_only
from duoka.run.calls import ApiCalls


def install(patches: Patches, calls: ApiCalls) -> None:
    """Intercept `torch.autograd.backward` and `torch.autograd.grad`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def weighted(first: Any, *args: Any, **kwargs: Any) -> Any:
            partition = calls.own_rows
            if partition is None or calls.local is not None:
                return original(first, *args, **kwargs)
            # The average over ranks divides by their number.
            weight = partition.rows * partition.world_size / partition.n
            return original(tree_map_only(Tensor, lambda loss: loss * weight, first), *args, **kwargs)

        return weighted

    def make_named(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        weighted = make(original)

        def by_name(*args: Any, **kwargs: Any) -> Any:
            return weighted(*args, **kwargs) if args else weighted(kwargs.pop(name), **kwargs)

        return by_name

    patches.replace(torch.autograd, "backward", lambda original: make_named(original, "tensors"))
    patches.replace(torch.autograd, "grad", lambda original: make_named(original, "outputs"))
