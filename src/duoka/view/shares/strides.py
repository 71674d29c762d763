"""The strides of a batch and of a rank's rows: each follow from the other. Arithmetic, without a collective.

A batch is laid out as one device's tensor, and a rank's rows as if the other rows were cut out of that memory. So the
distance between two samples is the same in both, and so are all distances within a sample. A distance that leads past
all n samples (that of the time steps in `[T, B, C]`) leads past this rank's rows instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

Strides = tuple[int, ...]


def local_distance(distance: int, sample: int, n: int, rows: int) -> int:
    """Convert a distance in the memory of a batch of n samples to that in the memory of `rows` samples.

    sample: the distance between two samples.
    """
    if sample == 0 or distance < n * sample:
        return distance
    past, within = divmod(distance, n * sample)
    return past * rows * sample + within


def global_distance(distance: int, sample: int, n: int, rows: int) -> int:
    """Convert a distance in the memory of `rows` samples to that in the memory of a batch of n samples."""
    return local_distance(distance, sample, max(rows, 1), n)


def local_strides(strides: Sequence[int], dim: int, inner: int, n: int, rows: int) -> Strides:
    """Return the strides of a rank's rows. strides: of the batch; dim, inner: where its n samples are (`Spec`)."""
    sample = strides[dim] * inner
    return tuple(
        stride if at == dim else local_distance(stride, sample, n, max(rows, 1)) for at, stride in enumerate(strides)
    )


def global_strides(strides: Sequence[int], dim: int, inner: int, n: int, rows: int) -> Strides:
    """Return the strides of the batch of which a rank's rows have these strides.

    A single row does not determine them, as torch may give any stride to a dimension of size 1.
    """
    return local_strides(strides, dim, inner, max(rows, 1), n)


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def same_layout(shape: Sequence[int], some: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if two tensors of this shape have the same strides, but for dimensions of size 1."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, some, other, strict=True))


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest in memory, the order in which random draws fill it."""
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected = 1
    for dim in reversed(memory_order(strides)):
        if shape[dim] != 1:
            if strides[dim] != expected:
                return False
            expected *= shape[dim]
    return True


def without_repetitions(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the part of a tensor that is repeated where `strides`, of a tensor of its shape, expand it."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def overwrite(target: Tensor, source: Tensor) -> None:
    """Copy the values of a tensor into another of its shape; into elements that are repeated there once."""
    strides = target.stride()
    without_repetitions(target, strides).copy_(without_repetitions(source, strides))


def covers(
    shape: Sequence[int], strides: Sequence[int], part: Sequence[int], part_strides: Sequence[int], offset: int
) -> bool:
    """Return True if a tensor has all elements of a part, whose first is `offset` elements after the tensor's."""
    if 0 in part or 0 in shape:
        return 0 in part
    last = offset + sum((size - 1) * stride for size, stride in zip(part, part_strides, strict=True))
    if is_dense(shape, strides):
        return last < prod(shape)
    return bool(np.isin(_positions(part, part_strides) + offset, _positions(shape, strides)).all())


def _positions(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the distance of each element of a tensor from its first."""
    positions = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        if stride:
            positions = (positions[:, None] + np.arange(size) * stride).ravel()
    return positions
