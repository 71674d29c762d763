"""The rows of a sharded tensor, and their places in the whole, which files hold."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from duoka.view.tensor.batch import BatchTensor


def is_sharded(value: Any) -> bool:
    """Return True for a tensor whose rows are divided over ranks (with hsdp, over those of each machine)."""
    if not isinstance(value, BatchTensor):
        return False
    spec = value._spec
    return spec.view.of_parameters and spec.outer == 1 == spec.inner


class Run(NamedTuple):
    """Rows that are contiguous in a file.

    at: offset in the whole tensor. start: offset in a rank's rows, which are contiguous too. size: all in bytes.
    """

    at: int
    start: int
    size: int


def runs_of(tensor: BatchTensor, itemsize: int) -> list[Run]:
    """Return the contiguous byte ranges that this rank's rows occupy in the whole of a sharded tensor.

    There is one range if the tensor is sharded along its first dimension; none if this rank has no elements.
    itemsize: bytes per element.
    """
    spec, shape = tensor._spec, tensor.shape
    row = math.prod(shape[spec.dim + 1 :]) * itemsize
    own, first = spec.partition.rows * row, spec.partition.start * row
    count = math.prod(shape[: spec.dim]) if own else 0
    return [Run(number * shape[spec.dim] * row + first, number * own, own) for number in range(count)]
