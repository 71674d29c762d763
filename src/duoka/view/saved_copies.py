"""Copies of a batch that autograd may have saved: what the script writes to the batch is to reach its backward pass.

A gathered copy is saved by a function that was computed whole; rows are saved that were copied from a plain tensor
which a module was given. On one device both are the memory that the script writes to.

Why: docs/decisions/0020-gathered-copies.md
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.weak import TensorWeakRef

from duoka.private.torch import WeakMemory, base_of, memory_of
from duoka.view.aliased import AliasedCopies, AliasedCopy
from duoka.view.copy_memory import CopyMemory
from duoka.view.memory import as_in_memory, counter_of, form_of, version
from duoka.view.shares.strides import Strides, overwrite
from duoka.view.transforms import records_gradients, without_modes

if TYPE_CHECKING:
    from duoka.view.tensor.spec import Spec

_GATHERED_AT_MOST = 64  # copies noted


@dataclass(slots=True, eq=False)
class _Gathered:
    """A gathered copy that autograd may have saved: weak references, and what makes tensors of them again."""

    rows_memory: WeakMemory
    memory: WeakMemory
    form_of_rows: tuple[int, torch.Size, Strides]  # place of the first element, shape, strides
    shape: torch.Size
    strides: Strides
    offset: int
    spec: Spec
    device: torch.device
    requires_grad: bool
    counter: Tensor  # counts the writes to the rows, also to those that the script no longer has
    counter_of_copy: Tensor  # as autograd checks it: what it saves of a result is another tensor
    version: int  # of the rows, when they were gathered

    def copy(self, rows: Tensor) -> AliasedCopy:
        """Return the copy as one that is held as long as autograd does. rows: any of its memory."""
        offset, shape, strides = self.form_of_rows
        rows = as_in_memory(rows).as_strided(shape, strides, offset).detach()
        memory = self.memory.storage()
        if memory is None:  # others may have it still
            full = torch.empty_strided(self.shape, self.strides, dtype=rows.dtype, device=self.device)
        else:
            full = rows.new_empty(0, device=self.device).set_(memory, self.offset, self.shape, self.strides)
        active = memory is not None
        copied = CopyMemory(full, [(self.spec, rows)], 1)
        return AliasedCopy(rows, self.spec, self.strides, copied, active=active, saved=True)


@dataclass(slots=True, eq=False)
class _Split:
    """A plain tensor of the script's, and rows that were copied from it, which autograd may save."""

    rows: TensorWeakRef  # to the tensor that counts writes
    plain: Tensor  # also if the script no longer has it, as on one device, where autograd saves it itself
    form_of_rows: tuple[int, torch.Size, Strides]
    form: tuple[int, torch.Size, Strides]
    spec: Spec
    dtype: torch.dtype
    versions: tuple[int, int]  # of both, when they were equal


class SavedCopies:
    """What autograd may have saved of the batches of a view, noted by weak references.

    aliased: the copies that the script may hold, among which those are whose values change before a pass.
    """

    def __init__(self, aliased: AliasedCopies) -> None:
        self._aliased = aliased
        self._gathered: deque[_Gathered] = deque(maxlen=_GATHERED_AT_MOST)  # the last ones
        self._split: list[_Split] = []

    def note_gathered(self, rows: Tensor, spec: Spec, strides: Strides, full: Tensor) -> None:
        """Note a gathered copy that autograd may save."""
        if full.requires_grad or (records_gradients() and not full.is_inference()):
            of_copy = full.shape, strides, int(full.storage_offset()), spec, full.device, full.requires_grad
            form, number = form_of(rows), self._aliased.version(rows)
            counters = counter_of(rows), counter_of(full)
            self._gathered.append(_Gathered(WeakMemory(rows), WeakMemory(full), form, *of_copy, *counters, number))

    def note_equal(self, rows: Tensor, full: Tensor) -> None:
        """Note that a write to rows is one to their copy, too, which has counted it."""
        memory = (memory_of(rows), memory_of(full)) if self._gathered else None
        for gathered in self._gathered:
            if (gathered.rows_memory.number, gathered.memory.number) == memory:
                gathered.version = self._aliased.version(gathered.counter)  # which `x.data` has of its own

    def count_writes(self) -> None:
        """Count a write to each gathered copy of rows that were written to since; called before a backward pass.

        If autograd has saved the copy, torch raises the error that it raises on one device.
        """
        for gathered in [*self._gathered]:
            is_saved = gathered.memory.storage() is not None
            if is_saved and self._aliased.version(gathered.counter) != gathered.version:
                increment_version(gathered.counter_of_copy)
                self._gathered.remove(gathered)  # its values are older than the rows'

    def note_split(self, rows: Tensor, spec: Spec, plain: Tensor) -> None:
        """Note a plain tensor from which rows were copied; autograd may save the rows."""
        self._split = [split for split in self._split if split.rows() is not None]
        if not records_gradients() or any(of.is_inference() or of.is_conj() or of.is_neg() for of in (rows, plain)):
            return
        bases, versions = (TensorWeakRef(base_of(rows)), base_of(plain)), (version(rows), version(plain))
        self._split.append(_Split(*bases, form_of(rows), form_of(plain), spec, rows.dtype, versions))

    def holds(self, plain: Tensor) -> bool:
        """Return whether rows of a plain tensor may be saved that were copied from it."""
        return any(split.plain is plain for split in self._split)

    def copy_split(self) -> None:
        """Copy plain tensors into the rows that were copied from them before; called before a backward pass.

        So that the pass reads what the script has written since; if torch has counted this, it raises its error.
        """
        live, self._split = self._split, []
        for split in live:
            rows, plain = split.rows(), split.plain
            if rows is None or version(rows) != split.versions[0]:  # the rows may be newer
                continue
            target, source = (
                torch.empty(0, dtype=split.dtype, device=of.device).set_(of.untyped_storage(), *form)
                for of, form in ((rows, split.form_of_rows), (plain, split.form))
            )
            with without_modes():
                overwrite(target, split.spec.local_rows(source))
            if version(plain) != split.versions[1]:
                equal = [copy for copy in self._aliased.of_memory(rows) if copy.rows_version() == copy.versions[0]]
                increment_version(rows)
                for copy in equal:  # of a module's batch: only ranks on which autograd has its rows see this write
                    copy.versions = copy.rows_version(), copy.versions[1]
            split.versions = version(rows), version(plain)
            self._split.append(split)

    def add(self, rows: Tensor) -> None:
        """Keep copies of the memory of `rows` that autograd may have saved: a write through `x.data` reaches them.

        Also those that this rank no longer holds; the ranks agree on that at the write.
        """
        memory = memory_of(rows)
        for gathered in [gathered for gathered in self._gathered if gathered.rows_memory.number == memory]:
            if not gathered.requires_grad:
                continue
            self._gathered.remove(gathered)
            if gathered.version != self._aliased.version(rows):
                continue  # its values are older than the rows'
            # A tensor made in inference mode could not be written outside of it.
            with without_modes(), torch.inference_mode(False), torch.no_grad():
                self._aliased.copies.append(gathered.copy(rows))
