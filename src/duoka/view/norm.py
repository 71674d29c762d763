"""BatchNorm over the whole batch: the statistics of all ranks' rows, on any device.

Ranks' means and variances are combined as in Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances" (1979); the gradient is that of Ioffe & Szegedy, "Batch normalization" (2015).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.collectives import AllSum, Collectives, Entered

_one_device = F.batch_norm  # plain scripts get another one, which comes here


def whole_batch_norm(
    rows: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
    ranks: Collectives,
) -> Tensor:
    """Training-mode `F.batch_norm` of this rank's `rows`, shape (share, C, ...).

    counts: (world_size,), how many values a channel has on each rank. The running statistics are those that
    one device would have, on every rank.
    """
    out, mean, var = _WholeBatchNorm.apply(rows, weight, bias, eps, counts, ranks)
    if running_mean is not None and running_var is not None:
        total = counts.sum()
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * total / (total - 1)).to(running_var.dtype), momentum)
    return out  # type: ignore[no-any-return]


class _WholeBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        counts: Tensor,
        ranks: Collectives,
    ) -> Any:
        dense = rows if rows.dtype == torch.float64 else rows.float()
        var, mean = torch.var_mean(dense, dim=_all_but_channels(rows), correction=0)
        means, variances = ranks.all_gather(torch.stack([mean, var])).unbind(1)
        share = (counts.to(mean.dtype) / counts.sum()).unsqueeze(1)
        mean = (share * means).sum(0)
        var = (share * (variances + (means - mean) ** 2)).sum(0)
        ctx.save_for_backward(rows, weight, bias, mean, var)
        ctx.eps, ctx.total, ctx.ranks = eps, counts.sum(), ranks
        scale, shift = (None if value is None else value.to(mean.dtype) for value in (weight, bias))
        out = _one_device(rows, mean, var, scale, shift, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, var)
        return out, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight, bias, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody asks for a gradient of this gradient
            wanted = [value is not None and value.requires_grad for value in (rows, weight, bias)]
            inputs = [value for value, wants in zip((rows, weight, bias), wanted, strict=True) if wants]
            out = _in_steps(rows, weight, bias, ctx.eps, ctx.total, ctx.ranks)
            found = list(torch.autograd.grad(out, inputs, grads[0], create_graph=True, allow_unused=True))
            return (*(found.pop(0) if wants else None for wants in wanted), None, None, None)
        shape, dims = _channels(rows), _all_but_channels(rows)
        grad = grads[0] if rows.dtype == torch.float64 else grads[0].float()
        inverse = (var + ctx.eps).rsqrt()
        centred = (rows - mean.view(shape)) * inverse.view(shape)
        sums = torch.stack([grad.sum(dims), (grad * centred).sum(dims)])
        by_bias, by_weight = sums.unbind()
        means = ctx.ranks.all_reduce(sums.clone()) / ctx.total
        scale = inverse if weight is None else inverse * weight
        by_rows = (grad - means[0].view(shape) - centred * means[1].view(shape)) * scale.view(shape)
        return (
            by_rows.to(rows.dtype),
            None if weight is None else by_weight.to(weight.dtype),
            None if bias is None else by_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _in_steps(
    rows: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, total: Tensor, ranks: Collectives
) -> Tensor:
    """The same in operations that autograd can differentiate twice."""
    shape, dims = _channels(rows), _all_but_channels(rows)
    mean = Entered.apply(AllSum.apply(rows.sum(dims), ranks), ranks) / total
    centred = rows - mean.view(shape)
    var = Entered.apply(AllSum.apply((centred * centred).sum(dims), ranks), ranks) / total
    out: Tensor = centred * (var + eps).rsqrt().view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _channels(rows: Tensor) -> list[int]:
    return [1, -1, *(1 for _ in range(rows.dim() - 2))]


def _all_but_channels(rows: Tensor) -> list[int]:
    return [0, *range(2, rows.dim())]
