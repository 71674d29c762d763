"""A gathered copy that a batch keeps, so that a loop over its rows gathers once and runs at one device's speed.

While the copy is equal to the batch, `x[i]`, `x[i, :3]` and `x[i] = value` use it directly, without a rule. A write
is copied into the rows before they are read again (`duoka.view.aliased`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from duoka.private.torch import memory_of
from duoka.view.aliased import AliasedCopies, holders, version
from duoka.view.support.transforms import operators_are_observed, records_gradients
from duoka.view.tensor.batch import BatchTensor
from duoka.view.tensor.spec import Spec

_PARTS = (int, slice, type(None), type(Ellipsis), Tensor)


@dataclass(eq=False)
class CachedCopy:
    """A gathered copy, `full`, of a rank's `rows`, and the numbers that show whether both are still equal.

    pointer: address of the rows' data. versions: write counts of `rows` and `full` when these were last equal.
    number: the entry of `AliasedCopies.numbers` for the rows' memory at that time. A different entry now means that a
    write through another copy may have changed the rows without changing their version.
    """

    rows: Tensor
    full: Tensor
    pointer: int
    versions: tuple[int, int]
    number: int

    def mark_equal(self, aliased: AliasedCopies) -> None:
        """Note that rows and copy are equal now."""
        self.versions = aliased.version(self.rows), version(self.full)

    def of(self, rows: Tensor, aliased: AliasedCopies) -> Tensor | None:
        """Return the copy if it is still equal to `rows` and requires gradients if they do; else None."""
        if rows is not self.rows or self.versions != (aliased.version(rows), version(self.full)):
            return None
        memory = memory_of(rows)
        if rows.data_ptr() != self.pointer or aliased.numbers[memory] != self.number:
            return None
        others = [copy for copy in aliased.of_memory(rows) if copy.full is not self.full]
        aliased.forget_unheld(others)
        if any(copy in aliased.copies for copy in others):
            return None
        return self.full if self.full.requires_grad == (rows.requires_grad and records_gradients()) else None


def cache_copy(batch: BatchTensor, full: Tensor) -> None:
    """Keep a copy that equals the batch."""
    rows, aliased = batch._shares[0]._rows, batch._spec.view.aliased
    now = CachedCopy(rows, full, rows.data_ptr(), (0, 0), aliased.numbers[memory_of(rows)])
    if batch._cached is not None and batch._cached.full is full:
        batch._cached.__dict__.update(now.__dict__)  # the same object, which `add_alias` refers to
    else:
        batch._cached = now
    batch._cached.mark_equal(aliased)


def _mark_equal(cached: ReferenceType[CachedCopy], aliased: AliasedCopies) -> None:
    """Mark a copy that a batch may still keep as equal to the batch again."""
    known = cached()
    if known is not None:
        known.mark_equal(aliased)


def index_cached(batch: Any, index: Any, *value: Any) -> Any:
    """Compute `batch[index]`, or `batch[index] = value`, by the copy that the batch keeps.

    Return NotImplemented if it keeps none that is up to date, or if `index` does not choose rows by their number.
    """
    if type(batch) is not BatchTensor or batch._cached is None or not chooses_rows(batch, index):
        return NotImplemented
    view, full = batch._meta.spec.view, batch._cached.full
    if (
        view.of_parameters
        or view.has_sharded
        or operators_are_observed()
        or (value and not _may_be_written(batch, *value))
    ):
        return NotImplemented
    if not _is_up_to_date(batch, view.aliased):
        return NotImplemented
    view.whole_operations.repeated += 1
    if not value:
        return full[index]
    full[index] = value[0]
    return None


def chooses_rows(batch: BatchTensor, index: Any) -> bool:
    """Return True if an index begins with the number of a row, or with a slice of rows that are no whole block."""
    spec: Spec = batch._meta.spec
    if type(index) is int or spec.dim != 0:
        return spec.dim == 0
    first = index[0] if type(index) is tuple and index else index
    if type(index) is tuple and not all(type(part) in _PARTS for part in index):
        return False
    if type(first) is slice:
        start, stop, step = first.indices(spec.size)
        return step != 1 or (stop - start) % (spec.partition.n * spec.inner) != 0
    return type(first) is int or (type(first) is Tensor and first.dim() == 0 and first.dtype != torch.bool)


def caches_written(batch: Any, index: Any, value: Any) -> bool:
    """Return True if the copy into which `batch[index] = value` is written is worth keeping for the next rows."""
    return type(batch) is BatchTensor and chooses_rows(batch, index) and _may_be_written(batch, value)


def _may_be_written(batch: BatchTensor, value: Any) -> bool:
    """Return True if autograd does not record a write of this value."""
    if batch._rows.requires_grad:
        return False
    return isinstance(value, (int, float)) or (type(value) is Tensor and not value.requires_grad)


def _is_up_to_date(batch: BatchTensor, aliased: AliasedCopies) -> bool:
    """Return True if the copy that the batch keeps has its values; then writes to it are seen."""
    cached, rows = batch._cached, batch._rows
    if aliased.has_uncounted_writes or rows is not cached.rows or rows.data_ptr() != cached.pointer:
        return False
    memory = memory_of(rows)
    if aliased.numbers[memory] != cached.number:
        return False
    here = aliased.of_memory(rows)
    alias = here[0] if here else None
    if len(here) > 1 or (alias is not None and alias.full is not cached.full):
        return False
    if alias is not None and not (rows.requires_grad or cached.full.requires_grad):
        if alias.versions[0] != aliased.version(rows):  # the copy may have been written to since
            return False
    elif cached.of(rows, aliased) is None:
        return False
    if alias is None:
        add_alias(batch, cached.full, holders(cached.full), cached.full)
    else:
        alias.active = True  # the script gets it again
    return True


def add_alias(batch: BatchTensor, full: Tensor, holders: int, out: Any) -> None:
    """Keep track of the copy `full` of a batch, if the result `out` that the script gets shares its memory."""
    cached = batch._cached if batch._cached is not None and batch._cached.full is full else None
    for share in batch._shares:
        meta, aliased = share._meta, share._meta.spec.view.aliased
        # No weak reference to the batch itself: a tensor that has one cannot change its shape in place.
        written_back = partial(_mark_equal, ref(cached), aliased) if cached is not None else None
        aliased.add(share._rows, meta.spec, meta.strides, full, holders, out, written_back)
    if cached is not None:
        cache_copy(batch, full)
