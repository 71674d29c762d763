"""Dropout that kernels of GPUs draw by themselves: fused attention, cuDNN's recurrent layers.

A GPU's generator is a seed and an offset into the numbers that follow from it. A kernel of attention takes those of
sample i from `offset + i * taken`. So a rank whose rows begin at row `start` of the batch draws what one device draws
for them, if its generator begins at `offset + start * taken`. Which numbers cuDNN's layers take is not known
(`recurrent.py` computes them whole).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from duoka.private.torch import schema_of
from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import Args, Kwargs
from duoka.view.tensor.spec import Spec

UNIT = 4  # of the offset of a GPU's generator

# What a kernel takes for each sample of queries (n, heads, L, E) and keys (n, heads, S, E), from torch's sources
# (aten/src/ATen/native/transformers), and what follows these and the values in a call of it, up to `dropout_p`.
_ATTENTION: dict[str, tuple[Callable[[Tensor, Tensor], int], tuple[Any, ...]]] = {
    "_scaled_dot_product_flash_attention": (lambda query, key: 32 * query.shape[1], ()),
    "_scaled_dot_product_efficient_attention": (
        lambda query, key: query.shape[1] * query.shape[2] * key.shape[2],
        (None, False),
    ),
}


@cache
def drops_inside(operator: Any) -> bool:
    """Return True for a kernel that draws dropout by itself."""
    return any(argument.name in ("dropout_p", "dropout") for argument in schema_of(operator).arguments)


def drawn_inside(operator: Any, args: Args, kwargs: Kwargs, spec: Spec) -> Any:
    """Call such a kernel with rows: it draws what it draws on one device, or, if that is not known, says so."""
    device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    generator = _generator_of(device)
    taken = _taken(operator, args, spec, generator)
    if taken is None:
        return _drawn_apart(operator, args, kwargs, spec, generator)
    offset = generator.get_offset()
    generator.set_offset(offset + spec.partition.start * taken)
    try:
        return operator(*args, **kwargs)
    finally:
        generator.set_offset(offset + _rounded(spec.size * taken))


def _taken(operator: Any, args: Args, spec: Spec, generator: Any) -> int | None:
    """Return how many numbers the kernel takes for each sample: the same on all ranks; None if that is not known."""
    name, contiguous = operator.overloadpacket.__name__, type(spec.partition) is Partition
    if name not in _ATTENTION or not contiguous or (spec.dim, spec.outer, spec.inner) != (0, 1, 1):
        return None
    query, key = args[:2]
    taken = _ATTENTION[name][0](query, key)
    if taken % UNIT or not hasattr(generator, "set_offset"):
        return None
    return taken if _is_as_known(operator, query.dtype, query.device) else None


@cache
def _is_as_known(operator: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if this torch's kernel drops of the second of two samples what it drops of that one alone."""
    taken_of, more = _ATTENTION[operator.overloadpacket.__name__]
    generator = _generator_of(device)
    state = generator.get_state()
    query = torch.zeros(2, 2, 8, 16, dtype=dtype, device=device)
    key = torch.zeros(2, 2, 16, 16, dtype=dtype, device=device)
    value = torch.eye(16, dtype=dtype, device=device).repeat(2, 2, 1, 1)  # so the result shows what is dropped
    offset, taken = generator.get_offset(), taken_of(query, key)
    try:
        both = operator(query, key, value, *more, 0.5)[0]
        after = generator.get_offset()
        generator.set_offset(offset + taken)
        second = operator(query[1:], key[1:], value[1:], *more, 0.5)[0]
    except Exception:  # the kernel is not for such inputs
        return False
    finally:
        generator.set_state(state)
    return bool(after == offset + _rounded(2 * taken) and torch.equal(both[1:], second))


def _rounded(numbers: int) -> int:
    return -(-numbers // UNIT) * UNIT


def _generator_of(device: torch.device) -> Any:
    all_of_them = getattr(torch.get_device_module(device), "default_generators", [torch.default_generator])
    return all_of_them[device.index or 0]


def _drawn_apart(operator: Any, args: Args, kwargs: Kwargs, spec: Spec, generator: Any) -> Any:
    """Call the kernel so that each share draws from its own seed; all continue with one state."""
    name = operator.overloadpacket.__name__.strip("_")
    spec.view.say(f"{name} draws dropout in its kernel, on each rank for its rows: not the numbers of one device")
    state = generator.get_state()
    own_seed = zlib.crc32(f"{spec.partition.start}".encode(), zlib.crc32(state.numpy().tobytes()))
    generator.manual_seed(own_seed)
    try:
        return operator(*args, **kwargs)
    finally:
        generator.set_state(state)
        torch.rand((), device=generator.device)
