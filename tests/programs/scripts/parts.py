"""Runs a program whose layers compute each batch in parts, as ranks do: `parts.py COUNT program.py ...`.

So gradients, and the means of BatchNorm, are added up in another order. Nothing of duoka is used here: what differs
from the program alone is rounding.
"""

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

count = int(sys.argv.pop(1))
LAYERS = "linear embedding conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
batch_norm = F.batch_norm


def parts_of(rows: Tensor) -> Sequence[Tensor]:
    return torch.tensor_split(rows, [len(rows) * part // count for part in range(1, count)])


def in_parts(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def called(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if rows.dim() < 2 or len(rows) < count:
            return layer(rows, *args, **kwargs)
        return torch.cat([layer(part, *args, **kwargs) for part in parts_of(rows)])

    return called


def normalized(
    rows: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training or len(rows) < count:
        return batch_norm(rows, running_mean, running_var, weight, bias, training, momentum, eps)
    dims, shape = [dim for dim in range(rows.dim()) if dim != 1], [1, -1] + [1] * (rows.dim() - 2)
    size = rows.numel() // rows.shape[1]
    mean = sum((part.sum(dims) for part in parts_of(rows)), torch.zeros(())) / size
    apart = rows - mean.view(shape)
    var = sum((part.square().sum(dims) for part in parts_of(apart)), torch.zeros(())) / size
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.detach(), momentum)
        running_var.lerp_(var.detach() * size / (size - 1), momentum)
    out = apart * torch.rsqrt(var + eps).view(shape)
    return out if weight is None or bias is None else out * weight.view(shape) + bias.view(shape)


for name in LAYERS.split():
    setattr(F, name, in_parts(getattr(F, name)))
torch.mm = in_parts(torch.mm)
F.batch_norm = normalized
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
