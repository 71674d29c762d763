"""BatchNorm over the whole batch: the statistics of all ranks' rows, on any device.

Ranks' means and variances are combined as in Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm
for computing sample variances" (1979); the gradient is that of Ioffe & Szegedy, "Batch normalization" (2015). On
GPUs torch's kernels for this compute both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.private.torch import backward_of, has_kernel, uncounted
from duoka.view import originals
from duoka.view.rules.apart import apart, these
from duoka.view.rules.lookup import argument, functions
from duoka.view.shares.differentiable import AllReduceSum, Replicate, with_own_node
from duoka.view.shares.local import LocalShares
from duoka.view.tensor.batch import Args, BatchTensor, Function, Kwargs, Rule

Operands = tuple[Tensor, "Tensor | None", "Tensor | None"]  # rows (rows, C, ...), weight and bias (C,)


class Running(NamedTuple):
    """The running statistics of a call, which it updates if there are any, and its numbers."""

    mean: Tensor | None
    var: Tensor | None
    momentum: float
    eps: float

    def update(self, mean: Tensor, var: Tensor, total: Tensor) -> None:
        """Update them. mean, var: of the batch, shape (C,); total: values per channel.

        Like torch's kernels it counts no write: another call, of a plain tensor, may have saved them.
        """
        if self.mean is not None and self.var is not None:
            with torch.no_grad(), uncounted(self.mean), uncounted(self.var):
                self.mean.lerp_(mean.to(self.mean.dtype), self.momentum)
                self.var.lerp_((var * total / (total - 1)).to(self.var.dtype), self.momentum)


def batch_norm(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """F.batch_norm; in training with the statistics of the whole batch, or of each share (`View.batch_norm`)."""
    batch = args[0] if args else None
    training, operands = argument(args, kwargs, 5, "training", False), (*args[1:], *kwargs.values())
    if not training:
        return _EVALUATED(func, args, kwargs)
    if not isinstance(batch, BatchTensor):
        return NotImplemented
    spec, rows, shares = batch._spec, batch._local, batch._spec.view.shares
    if func is not F.batch_norm or spec.dim != 0 or any(isinstance(value, BatchTensor) for value in operands):
        return NotImplemented
    if batch.dim() < 2 or batch.numel() <= batch.shape[1]:
        return NotImplemented  # torch raises the error
    names = ("running_mean", "running_var", "weight", "bias")
    mean, var, weight, bias = (argument(args, kwargs, index, name) for index, name in enumerate(names, 1))
    given = [value for value in (mean, var, weight, bias) if value is not None]
    dtypes = {value.dtype for value in given}
    other_dtype = not (dtypes <= {batch.dtype} or (batch.dtype.itemsize <= 2 and dtypes == {torch.float32}))
    other_size = any(value.numel() != batch.shape[1] for value in given)
    if other_dtype or other_size or (mean is None) != (var is None):
        return NotImplemented  # torch raises the error
    momentum, eps = argument(args, kwargs, 6, "momentum", 0.1), argument(args, kwargs, 7, "eps", 1e-5)
    if spec.view.batch_norm == "local":
        if spec.view is not spec.view.siblings[0]:  # the running ones follow this rank's first share
            mean = var = None
        return BatchTensor(func(rows, mean, var, weight, bias, True, momentum, eps), spec)
    values = rows.numel() // rows.shape[1] // spec.partition.rows  # of a channel in a sample

    def normalise(
        rows: Tensor, mean: Any, var: Any, weight: Tensor | None, bias: Tensor | None, momentum: float, eps: float
    ) -> Any:
        running, counts = Running(mean, var, momentum, eps), _counts(spec.partition.sizes, values, rows.device)
        return shares.synchronize(
            lambda parts: whole_batch_norm(parts, running, counts, shares), (rows, weight, bias)
        )

    return BatchTensor(shares.recorded(normalise, rows, mean, var, weight, bias, momentum, eps), spec)


_EVALUATED = apart(these(1), inf)


@lru_cache(maxsize=256)
def _counts(sizes: tuple[int, ...], each: int, device: torch.device) -> Tensor:
    """Return the number of values per channel on each rank."""
    return torch.tensor(sizes, device=device) * each


def combined(means: Tensor, variances: Tensor, fractions: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the means and variances of shares, each of shape (shares, ...), into those of the batch, (...).

    fractions: the part of the batch's values that each share has, shape (shares,).
    """
    fractions = fractions.view(-1, *[1] * (means.dim() - 1))
    mean = (fractions * means).sum(0)
    return mean, (fractions * (variances + (means - mean) ** 2)).sum(0)


def whole_batch_norm(
    parts: Sequence[Operands], running: Running, counts: Tensor, shares: LocalShares
) -> Sequence[Tensor]:
    """Compute `F.batch_norm` in training with the statistics of the whole batch, and update the running ones.

    parts: the operands of each local share. counts: values per channel in each share of all ranks. The outputs have
    the shapes of the rows.
    """
    if shares.count == 1 and not shares.exact and _has_kernels(running, *parts[0]):
        return [_KernelBatchNorm.apply(shares, running, counts, *parts[0])]
    total = counts.sum()
    inputs = (operand for kind in zip(*parts, strict=True) for operand in kind)
    out: Sequence[Tensor] = _WholeBatchNorm.apply(shares, running, counts, total, *inputs)
    return [*map(with_own_node, out)] if shares.exact else out  # each rank runs the same nodes


class _WholeBatchNorm(torch.autograd.Function):
    """BatchNorm over the whole batch. Inputs with gradients: rows of all local shares, then weights, then biases."""

    @staticmethod
    def forward(
        ctx: Any, shares: LocalShares, running: Running, counts: Tensor, total: Tensor, *inputs: Tensor | None
    ) -> Any:
        rows, weights, biases = _apart(inputs, shares)
        dense = [part if part.dtype == torch.float64 else part.float() for part in rows]
        statistics = [torch.var_mean(part, dim=all_but_channels(part), correction=0) for part in dense]
        mine = [torch.stack([mean, var]) for var, mean in statistics]
        means, variances = shares.gather(mine).unbind(1)
        mean, var = combined(means, variances, counts.to(means.dtype) / total)
        running.update(mean, var, total)  # here: a checkpoint's recomputation ends when the last tensor is saved
        ctx.save_for_backward(running.mean, running.var, *inputs, mean, var)  # as torch, which sees writes to each
        ctx.eps, ctx.total, ctx.shares = running.eps, total, shares
        ctx.set_materialize_grads(False)
        return tuple(
            F.batch_norm(part, mean, var, _to(weight, mean), _to(bias, mean), False, 0.0, running.eps)
            for part, weight, bias in zip(rows, weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, _, *inputs, mean, var = ctx.saved_tensors
        shares = ctx.shares
        if all(grad is None for grad in grads):  # as a script's own Function may return
            return (None,) * len(ctx.needs_input_grad)
        rows, weights, biases = _apart(inputs, shares)
        grads = tuple(torch.zeros_like(of) if grad is None else grad for grad, of in zip(grads, rows, strict=True))
        if torch.is_grad_enabled():  # a gradient of this gradient is requested
            return None, None, None, None, *_gradients_in_steps(inputs, grads, ctx.eps, ctx.total, shares)
        shape, dims = channels(rows[0]), all_but_channels(rows[0])
        inverse = (var + ctx.eps).rsqrt()
        dense = [grad if grad.dtype == torch.float64 else grad.float() for grad in grads]
        centred = [(part - mean.view(shape)).mul_(inverse.view(shape)) for part in rows]
        sums = [
            torch.stack([grad.sum(dims), (grad * part).sum(dims)]) for grad, part in zip(dense, centred, strict=True)
        ]
        means = shares.total(sums) / ctx.total
        scales = [inverse if weight is None else inverse * weight for weight in weights]
        by_rows = [
            (grad - means[0].view(shape)).sub_(part.mul_(means[1].view(shape))).mul_(scale.view(shape)).to(of.dtype)
            for grad, part, scale, of in zip(dense, centred, scales, rows, strict=True)
        ]
        by_weight = [
            None if weight is None else pair[1].to(weight.dtype) for pair, weight in zip(sums, weights, strict=True)
        ]
        by_bias = [None if bias is None else pair[0].to(bias.dtype) for pair, bias in zip(sums, biases, strict=True)]
        return (None, None, None, None, *by_rows, *by_weight, *by_bias)


backward_of(_WholeBatchNorm).__name__ = "NativeBatchNormBackward0"  # which print shows


class _KernelBatchNorm(torch.autograd.Function):
    """BatchNorm over the whole batch by torch's kernels. Inputs with gradients: this rank's rows, weight, bias."""

    @staticmethod
    def forward(
        ctx: Any,
        shares: LocalShares,
        running: Running,
        counts: Tensor,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        rows = _dense(rows)
        mine = torch.stack(torch.batch_norm_stats(rows, running.eps))
        means, inverses = shares.processes.all_gather(mine).unbind(1)
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            means, means, inverses, *running, counts.to(means.dtype)
        )
        ctx.save_for_backward(running.mean, running.var, rows, weight, bias, mean, inverse, counts)
        ctx.shares, ctx.eps = shares, running.eps
        ctx.set_materialize_grads(False)
        return torch.batch_norm_elemt(rows, weight, bias, mean, inverse, running.eps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _, _, rows, weight, bias, mean, inverse, counts = ctx.saved_tensors
        shares: LocalShares = ctx.shares
        if grads[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled():
            inputs = (rows, weight, bias)
            return None, None, None, *_gradients_in_steps(inputs, grads, ctx.eps, counts.sum(), shares)
        wanted, grad = ctx.needs_input_grad[3:], _dense(grads[0])
        *sums, by_weight, by_bias = torch.batch_norm_backward_reduce(grad, rows, mean, inverse, weight, *wanted)
        by_rows = None
        if wanted[0]:
            total = shares.total([torch.stack(sums)])
            by_rows = torch.batch_norm_backward_elemt(
                grad, rows, mean, inverse, _to(weight, mean), total[0], total[1], counts.to(torch.int32)
            )
        return None, None, None, by_rows, by_weight if wanted[1] else None, by_bias if wanted[2] else None


def _has_kernels(running: Running, rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return True if torch has kernels for a call. It is the same on all ranks."""
    if (
        not has_kernel(torch.ops.aten.batch_norm_stats.default, rows.device.type)
        or not rows.is_floating_point()
        or (weight is None) != (bias is None)
    ):
        return False
    kind = torch.float64 if rows.dtype == torch.float64 else torch.float32
    kinds = {value.dtype for value in (running.mean, running.var) if value is not None}
    affine = {value.dtype for value in (weight, bias) if value is not None}
    return kinds <= {kind} and len(affine) <= 1 and affine <= {kind, rows.dtype}


def _dense(value: Tensor) -> Tensor:
    """Return a tensor in a layout that the kernels accept."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(value.dim())
    return value if last is not None and value.is_contiguous(memory_format=last) else value.contiguous()


def _gradients_in_steps(
    operands: Sequence[Tensor | None], grads: Sequence[Tensor], eps: float, total: Tensor, shares: LocalShares
) -> list[Tensor | None]:
    """Return gradients that can be differentiated again. operands: rows, weights, biases of all shares."""
    wanted = [value is not None and value.requires_grad for value in operands]
    views = [None if value is None else value.view_as(value) for value in operands]  # without hooks
    inputs = [value for value, wants in zip(views, wanted, strict=True) if wants]
    out = _in_steps(*_apart(views, shares), eps, total, shares)
    weighing = list(grads[: shares.count])
    gradients = list(originals.grad(out, inputs, weighing, create_graph=True, allow_unused=True))
    return [gradients.pop(0) if wants else None for wants in wanted]


def _apart(inputs: Sequence[Any], shares: LocalShares) -> tuple[list[Any], list[Any], list[Any]]:
    """Split a list of inputs into rows, weights and biases, each with one entry for every local share."""
    count = shares.count
    return list(inputs[:count]), list(inputs[count : 2 * count]), list(inputs[2 * count :])


def _to(value: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if value is None or like is None else value.to(like.dtype)


def _in_steps(
    rows: list[Tensor],
    weights: list[Tensor | None],
    biases: list[Tensor | None],
    eps: float,
    total: Tensor,
    shares: LocalShares,
) -> list[Tensor]:
    """Compute the normalised rows in operations that autograd can differentiate more than once."""
    shape, dims = channels(rows[0]), all_but_channels(rows[0])

    def mean_of(parts: list[Tensor]) -> list[Tensor]:
        means = Replicate.apply(shares, AllReduceSum.apply(shares, *(part.sum(dims) for part in parts)))
        return [mean / total for mean in means]

    centred = [part - mean.view(shape) for part, mean in zip(rows, mean_of(rows), strict=True)]
    spread = mean_of([part * part for part in centred])
    out: list[Tensor] = [part * (var + eps).rsqrt().view(shape) for part, var in zip(centred, spread, strict=True)]
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight is not None:
            out[index] = out[index] * weight.view(shape)
        if bias is not None:
            out[index] = out[index] + bias.view(shape)
    return out


def channels(rows: Tensor) -> list[int]:
    """Return the shape that broadcasts one value per channel with `rows`."""
    return [1, -1, *(1 for _ in range(rows.dim() - 2))]


def all_but_channels(rows: Tensor) -> list[int]:
    """Return the dimensions of `rows` over which statistics are computed."""
    return [0, *range(2, rows.dim())]


RULES: dict[Function, Rule] = dict.fromkeys(functions("batch_norm", (F, torch)), batch_norm)
