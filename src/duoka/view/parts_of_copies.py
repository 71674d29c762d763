"""A part of a gathered copy, for a view of the batch of which it is a copy: both then share memory, as on one device.

A view is known by its strides, which are equal in a rank's rows and in the whole batch except where the samples are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor


class Samples(Protocol):
    """The placement of the samples in a batch (`duoka.view.tensor.spec.Spec`)."""

    @property
    def partition(self) -> Any: ...
    @property
    def dim(self) -> int: ...
    @property
    def outer(self) -> int: ...
    @property
    def inner(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Step:
    """A dimension within a sample. stride: in the rows; there: in the copy."""

    size: int
    stride: int
    there: int


def part_of_copy(whole: Tensor, rows: Tensor, spec: Samples, part: Tensor, of: Samples) -> Tensor | None:
    """Return the part of `whole`, a gathered copy of `rows`, that is a copy of `part`, of the same memory.

    Return None if `part` is not among `rows`, or if a rank has a single sample, whose strides say nothing. All ranks
    get the same answer.
    """
    if spec.partition != of.partition or min(of.partition.sizes) < 2 or not spec.outer == of.outer == 1:
        return None
    if part.dtype != rows.dtype or 0 in part.shape or 0 in rows.shape:
        return None
    if rows.stride(spec.dim) * spec.inner != part.stride(of.dim) * of.inner:  # from sample to sample
        return None
    steps = _steps_within(rows, spec, whole)
    start = None if steps is None else _decomposed(int(part.storage_offset() - rows.storage_offset()), steps)
    if steps is None or start is None:
        return None
    sizes, last, strides = list(part.shape), list(start), [0] * part.dim()
    for dim, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
        count = of.inner if dim == of.dim else size
        step = _decomposed(stride, steps) if count > 1 else [0] * len(steps)
        if step is None:
            return None
        last = [at + (count - 1) * more for at, more in zip(last, step, strict=True)]
        strides[dim] = sum(more * one.there for more, one in zip(step, steps, strict=True))
    if any(at >= one.size for at, one in zip(last, steps, strict=True)):
        return None
    sample = whole.stride(spec.dim) * spec.inner
    if of.inner > 1 and strides[of.dim] * of.inner != sample:
        return None
    sizes[of.dim] = of.size
    strides[of.dim] = sample // of.inner
    offset = sum(at * one.there for at, one in zip(start, steps, strict=True))
    return whole.as_strided(sizes, strides, whole.storage_offset() + offset)


def _steps_within(rows: Tensor, spec: Samples, whole: Tensor) -> list[_Step] | None:
    """Return the dimensions within a sample by descending stride; None if elements overlap or interleave.

    Dimensions of size 1 are left out, and dimensions that are contiguous in `rows` and `whole` are merged.
    """
    samples = _Step(spec.partition.rows, rows.stride(spec.dim) * spec.inner, whole.stride(spec.dim) * spec.inner)
    sizes = [spec.inner if dim == spec.dim else size for dim, size in enumerate(rows.shape)]
    steps = [_Step(*one) for one in zip(sizes, rows.stride(), whole.stride(), strict=True) if one[0] > 1]
    steps.sort(key=lambda step: -step.stride)
    every = sorted([samples, *steps], key=lambda step: -step.stride)
    if any(slow.stride < fast.stride * fast.size for slow, fast in pairwise(every)) or every[-1].stride == 0:
        return None
    return _merged(steps)


def _merged(steps: list[_Step]) -> list[_Step]:
    """Merge dimensions that follow each other without a gap, in the rows and in the copy."""
    found: list[_Step] = []
    for step in steps:
        before = found[-1] if found else None
        if before and (before.stride, before.there) == (step.stride * step.size, step.there * step.size):
            found[-1] = _Step(before.size * step.size, step.stride, step.there)
        else:
            found.append(step)
    return found


def _decomposed(distance: int, steps: list[_Step]) -> list[int] | None:
    """Return how many steps of each dimension make up a distance in memory; None if none do."""
    found = []
    for step in steps:
        count, distance = divmod(distance, step.stride)
        found.append(count)
    return found if distance == 0 and all(count >= 0 for count in found) else None
