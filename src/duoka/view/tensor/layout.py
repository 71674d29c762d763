"""The memory order of a whole batch of which this rank has a single row, and names of backward functions.

Random draws fill a tensor in its memory order, which the strides of a single row do not determine. So the call is
repeated with whole tensors without values (device "meta").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duoka.private.torch import tree_map_only
from duoka.view.random.draws import memory_order
from duoka.view.tensor.batch import BatchTensor


def with_memory_order(out: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set the memory order of a batch `out = func(*args, **kwargs)` of which this rank has one row, and return it."""
    if not isinstance(out, BatchTensor) or out._spec.local_size > 1 or out._meta.order is not None:
        return out
    try:
        with torch.no_grad():
            args, kwargs = tree_map_only(Tensor, _whole_without_values, (args, kwargs))
            whole = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
        if whole.shape == out.shape:
            out.set_memory_order(memory_order(whole))
    except Exception:  # the operator does not support the device "meta"
        pass
    return out


def name_backward(out: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the name of the `grad_fn` that a call has on one device; `out`: its result here."""
    try:
        args, kwargs = tree_map_only(Tensor, _whole_without_values, (args, kwargs))
        args, kwargs = tree_map_only(Tensor, _asking, (args, kwargs))
        return type(func(*args, **kwargs).grad_fn).__name__
    except Exception:  # the operator does not support the device "meta"
        return type(out.grad_fn).__name__


def _asking(leaf: Tensor) -> Tensor:
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def backward_name(tensor: Tensor) -> str | None:
    """Return the name of the `grad_fn` that a tensor has on one device; None if it is that of the tensor itself."""
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
