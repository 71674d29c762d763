"""Collectives with gradients. Each call is one node of the autograd graph, for all shares of a process.

One convention holds everywhere. Every one of W shares runs the backward pass on its own copy of the replicated loss
L, so what is differentiated is W * L. A part that `AllReduceSum` adds up flows into all W copies: its gradient is the
sum of W equal ones, W times the given one. So a parameter that computes with rows gets W * (its rows' part of dL/dp),
and one that computes with replicated tensors only gets dL/dp on each share. The mean over shares, which strategies
compute, is dL/dp in both cases. A batch that is a leaf divides its own gradient by W (`View.divide_gradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from duoka.private.torch import backward_of, is_view
from duoka.view.shares.layout import StraightThrough, laid_out, laid_out_like
from duoka.view.shares.local import LocalShares
from duoka.view.shares.partition import Partition
from duoka.view.shares.strides import local_strides

Keep = Callable[[Sequence[Tensor | None]], bool]


class AllReduceSum(torch.autograd.Function):
    """All-reduce (sum) of the shares' partial results.

    The gradient is replicated, so its all-reduce is a multiplication by the number of shares.
    """

    @staticmethod
    def forward(ctx: Any, shares: LocalShares, *parts: Tensor) -> Tensor:
        ctx.shares, ctx.count = shares, len(parts)
        ctx.set_materialize_grads(False)
        return shares.total(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is None:  # as a script's own Function may return
            return None, *[None] * ctx.count
        size = ctx.shares.world_size
        return None, *(laid_out_like(grad * size, grad) for grad in _replicated(grads[0], ctx.shares))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> Any:
        return AllReduceSum.apply(ctx.shares, *tangents)


class Replicate(torch.autograd.Function):
    """Copies of a replicated tensor, one for each local share, whose gradients are averaged over all shares.

    keep: given the gradients of a parameter's copies, returns whether it averages and adds them itself, later.
    """

    @staticmethod
    def forward(ctx: Any, shares: LocalShares, tensor: Tensor, keep: Keep | None = None) -> tuple[Tensor, ...]:
        ctx.shares, ctx.keep = shares, keep
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) if keep is None else tensor.detach() for _ in range(shares.count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        known = next((grad for grad in grads if grad is not None), None)
        if known is None or (ctx.keep is not None and ctx.keep(grads)):
            return None, None, None
        parts = (torch.zeros_like(known) if grad is None else grad.contiguous() for grad in grads)
        return None, AllReduceSum.apply(ctx.shares, *parts) / ctx.shares.world_size, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, __: None) -> Any:
        return tuple(tangent.view_as(tangent) for _ in range(ctx.shares.count))


def _replicated(grad: Tensor, shares: LocalShares) -> tuple[Tensor, ...]:
    """Replicate a gradient for each local share; without `create_graph` no graph is needed."""
    return Replicate.apply(shares, grad) if torch.is_grad_enabled() else (grad,) * shares.count


def with_own_node(rows: Tensor) -> Any:
    """Return one of the results of a node for all shares, with the same memory and a node of its own.

    If a tensor with `retain_grad` is written in place, torch looks for that at the first result of the tensor's node.
    A view is returned as it is: torch refuses writes to it, and would not do so here.
    """
    return rows if is_view(rows) else StraightThrough.apply(rows, rows)


class AllGatherRows(torch.autograd.Function):
    """All-gather of all shares' rows, along dimension 0. Each share keeps its own rows of the gradient.

    partitions: one for each of `rows`, which are those of the local shares.
    """

    @staticmethod
    def forward(ctx: Any, shares: LocalShares, partitions: tuple[Partition, ...], *rows: Tensor) -> Tensor:
        ctx.partitions, ctx.shares = partitions, shares
        ctx.set_materialize_grads(False)
        sent = rows[0].detach() if len(rows) == 1 else torch.cat([part.detach() for part in rows])
        if sent.dtype == torch.bool:
            sent = sent.view(torch.uint8)
        partition = partitions[0].of_process(shares.processes.rank, shares.counts)
        if partition.rows < partition.largest:
            sent = torch.cat([sent, sent.new_zeros((partition.largest - partition.rows, *sent.shape[1:]))])
        parts = shares.processes.all_gather(sent)
        full = torch.cat([part[:size] for part, size in zip(parts, partition.sizes, strict=True)])
        return full.view(torch.bool) if rows[0].dtype == torch.bool else full

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if grads[0] is None:
            return None, None, *[None] * len(ctx.partitions)
        each = zip(_replicated(grads[0], ctx.shares), ctx.partitions, strict=True)
        return None, None, *(_own_rows(grad, partition, ctx.shares.world_size) for grad, partition in each)


def _own_rows(grad: Tensor, partition: Partition, size: int) -> Tensor:
    """Return a share's rows of a gradient, times `size`, laid out as the whole."""
    strides = local_strides(grad.stride(), 0, 1, partition.n, partition.rows)
    return laid_out(grad.narrow(0, partition.start, partition.rows) * size, strides)


class GatherParameters(torch.autograd.Function):
    """The whole parameters of a block, of which each rank holds rows (`sharding/block.py`).

    The gradient of the whole is this rank's; a rank's rows get the sum over ranks. block: gathers and reduces.
    places: indices of the parameters in it.
    """

    @staticmethod
    def forward(ctx: Any, block: Any, places: list[int], *rows: Tensor) -> Any:
        ctx.block, ctx.places = block, places
        ctx.set_materialize_grads(False)
        return block.unsharded_for_forward(places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *ctx.block.reduce_scatter_gradients(ctx.places, grads)


GATHERED = backward_of(GatherParameters)
