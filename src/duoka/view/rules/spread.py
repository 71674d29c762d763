"""Variances and standard deviations over the batch: ranks exchange their means and variances, and no rows.

They are combined as in BatchNorm (`duoka.view.rules.batch_norm`): a sum of squares would lose the digits of a
variance that is small beside the mean.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from duoka.view.rules.batch_norm import combined
from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import Args, BatchTensor, Kwargs
from duoka.view.tensor.spec import Spec

NAMES = ("var", "std", "var_mean", "std_mean")


def correction_of(args: Args, kwargs: Kwargs) -> float:
    """Return the number that is subtracted from the count, from `correction` or `unbiased`."""
    if (correction := kwargs.get("correction")) is not None:
        return float(correction)
    unbiased = kwargs.get("unbiased", next((value for value in args[1:3] if isinstance(value, bool)), True))
    return float(unbiased)


def spread(name: str, batch: BatchTensor, dims: list[int] | None, keepdim: bool, correction: float) -> Any:
    """Compute one of NAMES over dimensions that include the batch: one all-gather of two values per result."""
    spec, part = batch._spec, batch._local
    every = list(range(part.dim())) if dims is None else dims
    beside = prod(part.shape[dim] for dim in every if dim != spec.dim) * spec.outer * spec.inner
    counts = [rows * beside for rows in spec.partition.sizes]
    if not part.is_floating_point() or sum(counts) <= correction:
        return NotImplemented  # torch raises or warns
    # As torch computes it: on a CPU in 64 bits.
    dense = part.to(torch.float64 if part.is_cpu or part.dtype == torch.float64 else torch.float32)
    if part.shape[spec.dim]:
        var_and_mean = torch.var_mean(dense, every, correction=0, keepdim=keepdim)
    else:
        var_and_mean = (dense.sum(every, keepdim=keepdim),) * 2
    var, mean = _combined(var_and_mean, counts, spec)
    var = var * (sum(counts) / (sum(counts) - correction))
    first = (_root(var) if name.startswith("std") else var).to(part.dtype)
    return (first, mean.to(part.dtype)) if name.endswith("_mean") else first


def _combined(var_and_mean: tuple[Tensor, ...], counts: list[int], spec: Spec) -> tuple[Tensor, Tensor]:
    """Combine this rank's variance and mean with those of the other ranks. counts: values of each rank."""
    var, mean = var_and_mean
    ranks = spec.view.ranks
    of_ranks = Spec(spec.view, Partition(ranks.world_size, ranks.rank, ranks.world_size))
    variances, means = of_ranks.gather(torch.stack([var.flatten(), mean.flatten()]).unsqueeze(0)).unbind(1)
    fractions = torch.tensor(counts, dtype=var.dtype, device=var.device) / sum(counts)
    whole_mean, whole_var = combined(means, variances, fractions)
    return whole_var.view_as(var), whole_mean.view_as(mean)


def _root(var: Tensor) -> Tensor:
    """Return the square root, whose gradient at 0 is 0, as torch's of a standard deviation."""
    return torch.where(var == 0, var, torch.where(var == 0, 1, var).sqrt())
