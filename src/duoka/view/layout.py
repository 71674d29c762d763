"""How the whole of a batch would lie in memory, where a share of one row does not show it.

Random numbers fill memory in its order, and a dimension of one entry may have any place in that order. So what torch
would do to the whole is done to tensors without values (device "meta").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duoka.private.torch import tree_map_only
from duoka.view.batch import BatchTensor
from duoka.view.draws import memory_order


def with_order(out: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`out`, what `func` gave for a share of a batch; a batch of which one row is here knows how the whole lies."""
    if not isinstance(out, BatchTensor) or out._spec.local_size > 1 or out._meta.order is not None:
        return out
    try:
        with torch.no_grad():
            args, kwargs = tree_map_only(Tensor, _whole_without_values, (args, kwargs))
            whole = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
        if whole.shape == out.shape:
            out.lies_as(memory_order(whole))
    except Exception:  # torch cannot say: an operator without this device
        pass
    return out


def name_backward(out: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The name of the backward function that torch's own `func` gives what `out` was computed from batches for."""
    try:
        args, kwargs = tree_map_only(Tensor, _whole_without_values, (args, kwargs))
        args, kwargs = tree_map_only(Tensor, _asking, (args, kwargs))
        return type(func(*args, **kwargs).grad_fn).__name__
    except Exception:  # torch cannot say: an operator without this device
        return type(out.grad_fn).__name__


def _asking(leaf: Tensor) -> Tensor:
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def backward_name(tensor: Tensor) -> str | None:
    """The name of the backward function that a tensor has on one device, where it has another here."""
    if isinstance(tensor, BatchTensor):
        node = tensor._shares[0]._local.grad_fn
        return None if node is None else type(node).__name__
    return tensor.__dict__.get("backward_name")


def _whole_without_values(leaf: Tensor) -> Tensor:
    if not isinstance(leaf, BatchTensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    order = leaf._meta.order or memory_order(leaf._rows)
    dense = torch.empty([leaf.shape[dim] for dim in order], dtype=leaf.dtype, device="meta")
    return dense.permute([order.index(dim) for dim in range(leaf.dim())])
