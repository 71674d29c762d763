"""How gradients pass where shares of a batch meet. Each is one node of the graph, for all shares of a process.

One convention holds everywhere: the objective is the sum over shares of each share's copy of the loss, divided by
the number of shares where it reaches the parameters. So a replicated loss needs no weighting by share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duoka.view.cut import Cut
from duoka.view.shares import Shares


class AllSum(torch.autograd.Function):
    """Sum over shares of partial results. Its gradient is replicated, so summing it is multiplying it."""

    @staticmethod
    def forward(ctx: Any, own: Shares, *parts: Tensor) -> Tensor:
        ctx.own = own
        return own.total(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(grad * ctx.own.world_size for grad in _entered(grads[0], ctx.own))


class Entered(torch.autograd.Function):
    """A replicated tensor where it meets rows, for each own share: they have parts of its gradient, which are summed.

    Gives a tuple.
    """

    @staticmethod
    def forward(ctx: Any, own: Shares, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.own = own
        return tuple(tensor.view_as(tensor) for _ in range(own.count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, AllSum.apply(ctx.own, *(grad.contiguous() for grad in grads)) / ctx.own.world_size


def _entered(grad: Tensor, own: Shares) -> tuple[Tensor, ...]:
    """A replicated gradient on its way to rows; only a second backward pass needs to know."""
    return Entered.apply(own, grad) if torch.is_grad_enabled() else (grad,) * own.count


class Gathered(torch.autograd.Function):
    """Dimension 0 of all shares' rows, put together. The gradient is replicated: each keeps its own rows.

    cuts: one for each of the `rows`.
    """

    @staticmethod
    def forward(ctx: Any, own: Shares, cuts: tuple[Cut, ...], *rows: Tensor) -> Tensor:
        ctx.cuts, ctx.own = cuts, own
        sent = rows[0].detach() if len(rows) == 1 else torch.cat([part.detach() for part in rows])
        if sent.dtype == torch.bool:
            sent = sent.view(torch.uint8)
        cut = cuts[0].of_process(own.ranks.rank, own.ranks.world_size)
        if cut.rows < cut.largest:
            sent = torch.cat([sent, sent.new_zeros((cut.largest - cut.rows, *sent.shape[1:]))])
        parts = own.ranks.all_gather(sent)
        whole = torch.cat([part[:size] for part, size in zip(parts, cut.sizes, strict=True)])
        return whole.view(torch.bool) if rows[0].dtype == torch.bool else whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        each = zip(_entered(grads[0], ctx.own), ctx.cuts, strict=True)
        return None, None, *(grad.narrow(0, cut.start, cut.rows) * ctx.own.world_size for grad, cut in each)


class Together(torch.autograd.Function):
    """The whole parameters of a block, of which each rank has rows. Their gradients are this rank's own.

    A leaf's rows get the sum over ranks, as those of any batch. block: gathers and sums (sharded.py). places: in it.
    """

    @staticmethod
    def forward(ctx: Any, block: Any, places: list[int], *rows: Tensor) -> Any:
        ctx.block, ctx.places = block, places
        ctx.set_materialize_grads(False)
        return block.given(places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *ctx.block.own_gradients(ctx.places, grads)
