"""Tensors that are copied into memory with given strides, with their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duoka.private.torch import set_version
from duoka.view.shares.strides import Strides, is_dense, memory_order, same_layout, without_repetitions
from duoka.view.transforms import operators_are_observed


class StraightThrough(torch.autograd.Function):
    """`values` in the forward pass, of the shape of `tensor`, which gets their gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, values: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return *grads, None


class DenseGradient(torch.autograd.Function):
    """The same memory, whose gradient gets an entry for each of its own, also where it is one number for all."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None if grads[0] is None else grads[0] * 1


def laid_out(tensor: Tensor, strides: Strides, offset: int = 0, size: int = 0) -> Tensor:
    """Return a tensor with these strides: itself if it has them, else a copy, whose gradients autograd records.

    offset, size: the place of its first element in its memory, and the number of elements that this has; default:
    what it needs.
    """
    if same_layout(tensor.shape, tensor.stride(), strides) and size in (0, tensor.numel()):
        # torch compares the strides of dimensions of size 1, too, to tell whether two tensors are the same memory.
        records = tensor.requires_grad and torch.is_grad_enabled()
        if tensor.stride() == strides or (records and operators_are_observed()):
            return tensor
        values = tensor.detach().as_strided(tensor.shape, strides).detach()  # no view, as no copy is
        return StraightThrough.apply(tensor, values) if records else values
    every, tensor = tensor, without_repetitions(tensor, strides)
    if tensor is not every and every.requires_grad and torch.is_grad_enabled() and not operators_are_observed():
        # Each repetition has a gradient of its own.
        values = laid_out(tensor.detach(), strides, offset, size).expand(every.shape)
        return StraightThrough.apply(every, values)  # type: ignore[no-any-return]
    order = memory_order(strides)
    if is_dense(tensor.shape, strides) and size in (0, tensor.numel()):
        tensor = tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
        tensor = laid_out(tensor, strides)  # dimensions of size 1
    else:
        copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        if size:
            copy.set_(tensor.new_empty(size).untyped_storage(), offset, tensor.shape, strides)
        tensor = copy.copy_(tensor)
        set_version(copy, 0)
    return tensor.expand(every.shape)


def laid_out_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor with the strides of another: the gradient of a sum is one number, and `gradient / 2` is not."""
    return laid_out(tensor, other.stride())
