"""BatchNorm over the whole batch: the statistics of all ranks' rows, on any device.

Ranks' means and variances are combined as in Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances" (1979); the gradient is that of Ioffe & Szegedy, "Batch normalization" (2015).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view import originals
from duoka.view.crossings import AllSum, Entered
from duoka.view.shares import Shares

_one_device = F.batch_norm  # plain scripts get another one, which comes here


@dataclass(frozen=True, slots=True)
class Normalising:
    """A call of `F.batch_norm` in training mode. rows: shape (rows, C, ...); weight, bias: (C,)."""

    rows: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float
    eps: float

    def keep(self, mean: Tensor, var: Tensor, total: Tensor | int) -> None:
        """Move the running statistics towards the batch's; total: how many values a channel has in it."""
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_((var * total / (total - 1)).to(self.running_var.dtype), self.momentum)


def in_training(original: Callable[..., Any], of_batch: Callable[[Normalising], Tensor | None]) -> Callable[..., Any]:
    """`F.batch_norm` that in training mode is `of_batch`, but `original` where that gives None."""

    def batch_norm(
        input: Tensor,  # noqa: A002
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if training:
            out = of_batch(Normalising(input, running_mean, running_var, weight, bias, momentum, eps))
            if out is not None:
                return out
        return original(input, running_mean, running_var, weight, bias, training, momentum, eps)

    return batch_norm


def combined(means: Tensor, variances: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of all, shape (C,), of those of shares, (shares, C), with `counts` values each, (shares,)."""
    share = (counts.to(means.dtype) / counts.sum()).unsqueeze(1)
    mean = (share * means).sum(0)
    return mean, (share * (variances + (means - mean) ** 2)).sum(0)


def whole_batch_norm(
    call: Normalising,
    rows: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    counts: Tensor,
    own: Shares,
) -> list[Tensor]:
    """Training-mode `F.batch_norm` of each own share's `rows`, shape (share, C, ...).

    weights, biases: what stands for the parameters in each of them. counts: (world_size,), how many values a channel
    has in each share. The running statistics are those that one device would have, on every rank.
    """
    out: list[Tensor]
    *out, mean, var = _WholeBatchNorm.apply(own, call.eps, counts, *rows, *weights, *biases)
    call.keep(mean, var, counts.sum())
    return out


class _WholeBatchNorm(torch.autograd.Function):
    """Takes, and gives gradients to, the rows of all own shares, then their weights, then their biases."""

    @staticmethod
    def forward(ctx: Any, own: Shares, eps: float, counts: Tensor, *given: Tensor | None) -> Any:
        rows, weights, biases = _apart(given, own)
        dense = [part if part.dtype == torch.float64 else part.float() for part in rows]
        found = [torch.var_mean(part, dim=all_but_channels(part), correction=0) for part in dense]
        mine = torch.stack([torch.stack([mean, var]) for var, mean in found])
        means, variances = own.ranks.all_gather(mine).view(own.world_size, 2, -1).unbind(1)
        mean, var = combined(means, variances, counts)
        ctx.save_for_backward(*given, mean, var)
        ctx.eps, ctx.total, ctx.own = eps, counts.sum(), own
        out = [
            _one_device(part, mean, var, _to(weight, mean), _to(bias, mean), False, 0.0, eps)
            for part, weight, bias in zip(rows, weights, biases, strict=True)
        ]
        ctx.mark_non_differentiable(mean, var)
        return (*out, mean, var)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *given, mean, var = ctx.saved_tensors
        own = ctx.own
        rows, weights, biases = _apart(given, own)
        if torch.is_grad_enabled():  # somebody asks for a gradient of this gradient
            wanted = [value is not None and value.requires_grad for value in given]
            inputs = [value for value, wants in zip(given, wanted, strict=True) if wants]
            out = _in_steps(rows, weights, biases, ctx.eps, ctx.total, own)
            weighing = list(grads[: own.count])
            found = list(originals.grad(out, inputs, weighing, create_graph=True, allow_unused=True))
            return (None, None, None, *(found.pop(0) if wants else None for wants in wanted))
        shape, dims = channels(rows[0]), all_but_channels(rows[0])
        inverse = (var + ctx.eps).rsqrt()
        dense = [grad if grad.dtype == torch.float64 else grad.float() for grad in grads[: own.count]]
        centred = [(part - mean.view(shape)) * inverse.view(shape) for part in rows]
        sums = [
            torch.stack([grad.sum(dims), (grad * part).sum(dims)]) for grad, part in zip(dense, centred, strict=True)
        ]
        means = own.total(sums) / ctx.total
        scales = [inverse if weight is None else inverse * weight for weight in weights]
        by_rows = [
            ((grad - means[0].view(shape) - part * means[1].view(shape)) * scale.view(shape)).to(of.dtype)
            for grad, part, scale, of in zip(dense, centred, scales, rows, strict=True)
        ]
        by_weight = [
            None if weight is None else one[1].to(weight.dtype) for one, weight in zip(sums, weights, strict=True)
        ]
        by_bias = [None if bias is None else one[0].to(bias.dtype) for one, bias in zip(sums, biases, strict=True)]
        return (None, None, None, *by_rows, *by_weight, *by_bias)


def _apart(given: Sequence[Any], own: Shares) -> tuple[list[Any], list[Any], list[Any]]:
    """Rows, weights and biases, one of each for every own share."""
    count = own.count
    return list(given[:count]), list(given[count : 2 * count]), list(given[2 * count :])


def _to(value: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if value is None or like is None else value.to(like.dtype)


def _in_steps(
    rows: list[Tensor],
    weights: list[Tensor | None],
    biases: list[Tensor | None],
    eps: float,
    total: Tensor,
    own: Shares,
) -> list[Tensor]:
    """The same in operations that autograd can differentiate twice."""
    shape, dims = channels(rows[0]), all_but_channels(rows[0])

    def mean_of(parts: list[Tensor]) -> list[Tensor]:
        means = Entered.apply(own, AllSum.apply(own, *(part.sum(dims) for part in parts)))
        return [mean / total for mean in means]

    centred = [part - mean.view(shape) for part, mean in zip(rows, mean_of(rows), strict=True)]
    spread = mean_of([part * part for part in centred])
    out: list[Tensor] = [part * (var + eps).rsqrt().view(shape) for part, var in zip(centred, spread, strict=True)]
    for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight is not None:
            out[place] = out[place] * weight.view(shape)
        if bias is not None:
            out[place] = out[place] + bias.view(shape)
    return out


def channels(rows: Tensor) -> list[int]:
    """The shape of something for each channel beside `rows`."""
    return [1, -1, *(1 for _ in range(rows.dim() - 2))]


def all_but_channels(rows: Tensor) -> list[int]:
    """The dimensions of `rows` over which statistics are taken."""
    return [0, *range(2, rows.dim())]
