"""torch's fast path of `nn.TransformerEncoder` in evaluation, which leaves padded positions out and sets them to 0.

torch uses it for tensors of its own types only, so batches are gathered, and sharded parameters layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from duoka.private.torch import parameters_in


def leaves_out_padding(module: nn.Module) -> bool:
    """Return True if torch takes its fast path with plain tensors."""
    fast = isinstance(module, nn.TransformerEncoder) and not module.training and not torch.is_grad_enabled()
    return fast and bool(module.use_nested_tensor)


@contextmanager
def with_whole_parameters(module: nn.Module) -> Iterator[None]:
    """Put whole parameters in place of a module's sharded ones while the context is open."""
    replaced = []
    for part in module.modules():
        for name, parameter in list(parameters_in(part).items()):
            if (unsharded := getattr(parameter, "duoka_unsharded", None)) is not None:
                replaced.append((parameters_in(part), name, parameter))
                parameters_in(part)[name] = unsharded()
    try:
        yield
    finally:
        for table, name, parameter in replaced:
            table[name] = parameter
