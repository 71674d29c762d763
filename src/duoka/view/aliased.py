"""Gathered copies of batches that the script may hold a reference to: `row = x[0]`, `x.numpy()`.

On one device these share the batch's memory, so a write to one is visible in the other. Here a write to the copy is
copied into the rows before the batch is read again, and after a write to the rows the copy is gathered again. What
the script takes of a view of the batch is a part of the same copy where that holds all of it (`part_of_copy`); where
it does not, a write to one of two copies of the same memory that are held is refused.

A rank sees by reference counts whether its script holds a copy, and garbage collection may make that differ between
ranks. So it decides about no collective: the ranks forget a copy when they have agreed that none of them holds it,
or that it differs from the rows of one of them.

Three classes describe gathered copies: a `GatheredArgument` (whole.py) serves one operation; a `CachedCopy`
(whole.py) is kept by its batch as long as both are equal; an `AliasedCopy` is one whose memory the script
holds. Why: docs/decisions/0020-gathered-copies.md.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.weak import TensorWeakRef

from duoka.errors import Refused
from duoka.private.torch import (
    WeakMemory,
    base_of,
    count_references,
    is_mapped_over,
    is_transformed,
    memory_of,
    tree_leaves,
    uncounted,
    version_of,
)
from duoka.system.user_code import user_line
from duoka.view.shares.strides import Strides, covers, global_distance, without_repetitions
from duoka.view.transforms import records_gradients, without_modes

if TYPE_CHECKING:
    from duoka.view.tensor.spec import Spec

_GATHERED_AT_MOST = 64  # copies noted


@dataclass(slots=True, eq=False)
class AliasedCopy:
    """A gathered copy `full` of a rank's `rows`."""

    rows: Tensor
    spec: Spec
    strides: Strides  # of the batch, which `full` has
    full: Tensor
    holders: int = 0  # references to its memory before the script got one
    written_back: Callable[[], None] | None = None  # called after rows were updated from the copy
    versions: tuple[int, int] = (0, 0)  # of rows and copy when they were last equal
    grad_fn: Any = None  # of the copy at that time
    memory: int = 0  # of the rows
    number: int = 0  # among all copies of this memory, when the script last got it
    active: bool = True  # False if this rank has seen that its script no longer holds the copy
    saved: bool = False  # by autograd on some rank; on others it may have no values

    def __post_init__(self) -> None:
        self.memory = memory_of(self.rows)
        self.mark_equal()

    def mark_equal(self) -> None:
        """Note that rows and copy are equal now."""
        self.versions, self.grad_fn = (self.rows_version(), version(self.full)), self.full.grad_fn
        self.spec.view.aliased.note_equal(self.rows, self.full)

    def rows_version(self) -> int:
        """Return the number of writes to the rows."""
        return self.spec.view.aliased.version(self.rows)

    def offset(self) -> int:
        """Return the bytes from the start of the batch's memory to the first element of the copy."""
        partition, sample = self.spec.partition, self.strides[self.spec.dim] * self.spec.inner
        elements = global_distance(int(self.rows.storage_offset()), sample, partition.n, partition.rows)
        return elements * self.rows.itemsize

    def is_held(self) -> bool:
        """Return True if the script still holds a reference to the copy's memory."""
        return holders(self.full) > self.holders

    def part_of_copy(self, rows: Tensor, spec: Spec, strides: Strides) -> Tensor | None:
        """Return the part of `full` that is the copy of `rows`, of the same memory; None if it does not hold them.

        strides: of the batch whose rows these are. All ranks get the same answer.
        """
        full, partition, size, of = self.full, self.spec.partition, rows.itemsize, self.rows.itemsize
        sample = self.strides[self.spec.dim] * self.spec.inner * of  # in bytes, as are all distances here
        if spec.partition is not partition or strides[spec.dim] * spec.inner * size != sample or 0 in rows.shape:
            return None
        if rows.is_neg() != self.rows.is_neg() or (rows.dtype != self.rows.dtype and self.rows.is_conj()):
            return None
        before = int(rows.storage_offset() * size - self.rows.storage_offset() * of)
        if before < 0:
            return None
        offset = global_distance(before, sample, partition.n, partition.rows)
        shape = [spec.size if dim == spec.dim else length for dim, length in enumerate(rows.shape)]
        of_whole, of_part = [*(step * of for step in self.strides), 1], [*(step * size for step in strides), 1]
        if not covers([*full.shape, of], of_whole, [*shape, size], of_part, offset):
            return None
        start = full.storage_offset() * of + offset
        if rows.dtype != full.dtype:
            memory = full.untyped_storage().nbytes() // max(size, of) * max(size, of)
            full = full.as_strided((memory // of,), (1,), 0).view(rows.dtype)
        part = full.as_strided(shape, strides, start // size)
        return part.conj() if rows.is_conj() != self.rows.is_conj() else part

    def is_written(self, read: Tensor | None) -> bool:
        """Return True if the script has written to the copy since it was equal to the rows.

        read: the tensor about to be read, if not all are. A write by numpy, which torch does not count, matters only
        if that tensor would show it on one device.
        """
        if version(self.full) != self.versions[1]:
            return True
        if not self.full.is_cpu or self.rows_version() != self.versions[0]:
            return False
        if read is not None and self.is_held() and not same_memory(self.rows, read):
            return False
        return not self.is_equal()

    def is_equal(self) -> bool:
        """Return True if the copy has the values of this rank's rows."""
        return _equal(self._rows_of_copy().to(self.rows.device), self.rows)

    def write_through(self) -> None:
        """Update the rows from the gathered copy, to which the script has written.

        Raises:
            Refused: the write has a gradient.
        """
        if version(self.full) == self.versions[1]:
            self._write(self.rows.data)  # numpy: without counting a write, as on one device
            return
        self._refuse_gradients()
        with torch.no_grad():
            self._write(self.rows)
        self.mark_equal()
        if self.written_back is not None:
            self.written_back()

    def take(self, other: AliasedCopy) -> None:
        """Copy the values of another copy of the same memory, if one of them holds all of the other."""
        source: Tensor | None = other.part_of_copy(self.rows, self.spec, self.strides)
        target: Tensor | None = self.full
        if source is None:
            source, target = other.full, self.part_of_copy(other.rows, other.spec, other.strides)
        if target is not None:
            with torch.no_grad(), uncounted(self.full):
                strides = target.stride()
                without_repetitions(target, strides).copy_(without_repetitions(source.detach(), strides))
            self.mark_equal()

    def is_recorded(self, value: Tensor) -> bool:
        """Return True if `value` is of the copy's memory, and autograd recorded a write to that."""
        return self.full.grad_fn is not self.grad_fn and same_memory(value, self.full)

    def _refuse_gradients(self) -> None:
        if self.full.grad_fn is not self.grad_fn:
            raise Refused(
                f"rows taken from a batch were written into before {user_line()}, with a gradient; write through the "
                "batch itself instead: `x[i] = value`, not `x[i].add_(value)`"
            )

    def _write(self, rows: Tensor) -> None:
        strides = rows.stride()
        without_repetitions(rows, strides).copy_(without_repetitions(self._rows_of_copy(), strides))

    def _rows_of_copy(self) -> Tensor:
        return self.spec.local_rows(self.full.detach())


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
    bases: tuple[TensorWeakRef, TensorWeakRef]  # of rows and copy: the tensors that count writes
    version: int  # of the rows, when they were gathered

    def copy(self, rows: Tensor) -> AliasedCopy:
        """Return the copy as one that is held as long as autograd does. rows: any of its memory."""
        offset, shape, strides = self.form_of_rows
        rows = rows.detach().as_strided(shape, strides, offset)
        memory = self.memory.storage()
        if memory is None:  # others may have it still
            full = torch.empty_strided(self.shape, self.strides, dtype=rows.dtype, device=self.device)
        else:
            full = rows.new_empty(0, device=self.device).set_(memory, self.offset, self.shape, self.strides)
        active = memory is not None
        return AliasedCopy(rows, self.spec, self.strides, full, holders=1, active=active, saved=True)


@dataclass(slots=True, eq=False)
class _Split:
    """A plain tensor of the script's, and rows that were copied from it, which autograd may save."""

    rows: TensorWeakRef  # as `plain`: the tensor that counts writes
    plain: TensorWeakRef
    form_of_rows: tuple[int, torch.Size, Strides]
    form: tuple[int, torch.Size, Strides]
    spec: Spec
    dtype: torch.dtype
    versions: tuple[int, int]  # of both, when they were equal
    kept: Tensor | None  # holds a gathered copy, into which later writes to its batch come


class AliasedCopies:
    """The gathered copies of the batches of a view that the script may hold on some rank; nearly always none."""

    def __init__(self) -> None:
        # The same on all ranks for each batch that the script can reach; read by _replay.c.
        self.copies: list[AliasedCopy] = []
        self.has_uncounted_writes = False  # True once the script has used `x.data`: torch counts no write through it
        # Memory of tensors of the inference mode, which count no writes -> calls that may have written to it.
        self.unnumbered: Counter[int] = Counter()
        # Memory of rows -> how often the script has got a copy of it, or the ranks have forgotten one but the last.
        self.numbers: Counter[int] = Counter()
        self.gathered: deque[_Gathered] = deque(maxlen=_GATHERED_AT_MOST)  # the last ones
        self._split: list[_Split] = []

    @property
    def is_active(self) -> bool:
        """True if this rank's script may hold a copy."""
        return any(copy.active for copy in self.copies)

    def version(self, rows: Tensor) -> int:
        """Return a number that a write to these rows of a batch changes."""
        return self.unnumbered[memory_of(rows)] if rows.is_inference() else version_of(rows)

    def count_write(self, rows: Tensor) -> None:
        """Count a call that may have written to rows, if these do not count it themselves."""
        if rows.is_inference():
            self.unnumbered[memory_of(rows)] += 1

    def of_memory(self, rows: Tensor) -> list[AliasedCopy]:
        """Return the copies of the memory of these rows."""
        memory = memory_of(rows) if self.copies else 0
        return [copy for copy in self.copies if copy.memory == memory]

    def share_memory(self, batches: list[Tensor], others: list[Tensor]) -> bool:
        """Return True if one of other tensors is of the memory of a copy of one of these batches, given by rows."""
        return any(
            _overlap(copy.full, tensor) for rows in batches for copy in self.of_memory(rows) for tensor in others
        )

    def add(
        self,
        rows: Tensor,
        spec: Spec,
        strides: Strides,
        full: Tensor,
        holders: int,
        out: Any,
        written_back: Callable[[], None] | None,
    ) -> None:
        """Keep `full`, a copy of `rows`, if the result `out` that the script gets shares its memory.

        strides: of the batch. holders: references to its memory before. written_back: called whenever writes to the
        copy have been copied into the rows.
        """
        if isinstance(out, np.ndarray):  # writes to it are not counted, as those through `x.data`
            self.add_saved(rows)
        for copy in self.copies:
            if copy.memory == memory_of(rows) and same_memory(copy.full, full):
                copy.number, copy.active = self._next(copy.memory), True
                return
        if any(_has_memory_of(full, leaf) for leaf in ([out] if isinstance(out, Tensor) else tree_leaves(out))):
            with without_modes():
                copy = AliasedCopy(rows.detach(), spec, strides, full, holders, written_back)
                copy.number = self._next(copy.memory)
                self.copies.append(copy)

    def rows_of(self, full: Tensor, spec: Spec) -> Tensor | None:
        """Return the rows of which a plain tensor is the copy that the script holds."""
        for copy in self.copies:
            same = copy.full.data_ptr() == full.data_ptr() and copy.full.stride() == full.stride()
            if same and copy.full.shape == full.shape and copy.full.dtype == full.dtype and copy.spec == spec:
                return None if copy.saved else copy.rows.detach()
        return None

    def note_gathered(self, rows: Tensor, spec: Spec, strides: Strides, full: Tensor) -> None:
        """Note a gathered copy that autograd may save."""
        if full.requires_grad or (records_gradients() and not full.is_inference()):
            form = int(rows.storage_offset()), rows.shape, rows.stride()
            of_copy = full.shape, strides, int(full.storage_offset()), spec, full.device, full.requires_grad
            bases = TensorWeakRef(base_of(rows)), TensorWeakRef(base_of(full))
            number = self.version(rows)
            self.gathered.append(_Gathered(WeakMemory(rows), WeakMemory(full), form, *of_copy, bases, number))

    def note_equal(self, rows: Tensor, full: Tensor) -> None:
        """Note that a write to rows is one to their copy, too, which has counted it."""
        memory = (memory_of(rows), memory_of(full)) if self.gathered else None
        for gathered in self.gathered:
            if (gathered.rows_memory.number, gathered.memory.number) == memory:
                gathered.version = self.version(rows)

    def count_writes(self) -> None:
        """Count a write to each gathered copy of rows that were written to since; called before a backward pass.

        If autograd has saved the copy, torch raises the error that it raises on one device.
        """
        for gathered in self.gathered:
            rows, full = (base() for base in gathered.bases)
            if rows is not None and full is not None and self.version(rows) != gathered.version:
                increment_version(full)
                gathered.version = self.version(rows)

    def note_split(self, rows: Tensor, spec: Spec, plain: Tensor) -> None:
        """Note a plain tensor from which rows were copied; autograd may save the rows."""
        self._split = [split for split in self._split if split.rows() is not None]
        if not records_gradients() or any(of.is_inference() or of.is_conj() or of.is_neg() for of in (rows, plain)):
            return
        bases = TensorWeakRef(base_of(rows)), TensorWeakRef(base_of(plain))
        kept = plain.detach() if any(same_memory(copy.full, plain) for copy in self.copies) else None
        versions = version(rows), version(plain)
        self._split.append(_Split(*bases, _form(rows), _form(plain), spec, rows.dtype, versions, kept))

    def copy_split(self) -> None:
        """Copy plain tensors into the rows that were copied from them before; called before a backward pass.

        So that the pass reads what the script has written since; if torch has counted this, it raises its error.
        """
        live, self._split = self._split, []
        for split in live:
            rows, plain = split.rows(), split.plain()
            if rows is None or plain is None or version(rows) != split.versions[0]:  # the rows may be newer
                continue
            target, source = (
                torch.empty(0, dtype=split.dtype, device=of.device).set_(of.untyped_storage(), *form)
                for of, form in ((rows, split.form_of_rows), (plain, split.form))
            )
            strides = target.stride()
            without_repetitions(target, strides).copy_(without_repetitions(split.spec.local_rows(source), strides))
            if version(plain) != split.versions[1]:
                increment_version(rows)
            split.versions = version(rows), version(plain)
            self._split.append(split)

    def add_saved(self, rows: Tensor) -> None:
        """Keep copies of the memory of `rows` that autograd may have saved: a write through `x.data` reaches them.

        Also those that this rank no longer holds; the ranks agree on that at the write.
        """
        memory = memory_of(rows)
        for gathered in [gathered for gathered in self.gathered if gathered.rows_memory.number == memory]:
            if not gathered.requires_grad:
                continue
            self.gathered.remove(gathered)
            if gathered.version != self.version(rows):
                continue  # its values are older than the rows'
            # A tensor made in inference mode could not be written outside of it.
            with without_modes(), torch.inference_mode(False), torch.no_grad():
                self.copies.append(gathered.copy(rows))

    def of(self, rows: Tensor, spec: Spec, strides: Strides, others: Sequence[AliasedCopy] = ()) -> Tensor | None:
        """Return the existing copy of these rows, or its part; None if there is none, or if it must have gradients.

        others: further copies of their memory, which the script does not hold.
        """
        if rows.requires_grad and records_gradients():
            return None
        for copy in [*self.of_memory(rows), *others]:
            unusable = copy.saved or copy.full.requires_grad
            part = None if unusable else copy.part_of_copy(rows, spec, strides)
            if part is not None:
                copy.active = True
                same = part.shape == copy.full.shape and part.stride() == copy.full.stride()
                same = same and part.dtype == copy.full.dtype and part.is_conj() == copy.full.is_conj()
                return copy.full if same else part
        return None

    def write_back(self, rows: Tensor | None = None) -> None:
        """Copy writes to copies into the rows; called before these rows are read, and at the end of the script.

        Raises:
            Refused: see `AliasedCopy.write_through`; or the script holds another copy, which does not show the write.
        """
        copies, self.copies = self.copies, []  # `_local` of what is read here comes here again
        try:
            self._write_back(copies, rows)
        except Refused:
            self.copies = copies  # whichever share raises it first, all refuse what comes next
            raise

    def _write_back(self, copies: list[AliasedCopy], rows: Tensor | None) -> None:
        count = Counter(copy.memory for copy in copies)
        active = [copy for copy in copies if copy.active]
        released = [copy for copy in active if not copy.is_held()]
        last = [copy for copy in released if count[copy.memory] > 1]  # another copy of the memory may outlive it
        written = [copy for copy in active if copy.is_written(None if copy in last else rows)]
        by_script = [copy.memory for copy in written if not copy.saved]
        if len(set(by_script)) < len(by_script):
            raise _two_copies()
        for copy in written:
            copy.write_through()
        # numpy's write is seen only on the rank whose rows it changes. So before a pass, which reads what autograd
        # has saved, and when an array is gone, every rank takes all of its values.
        sources = [
            copy
            for copy in active
            if not copy.saved and (copy in written or (copy.full.is_cpu and (rows is None or copy in released)))
        ]
        for saved in [copy for copy in copies if copy.saved] if sources else []:
            for copy in sources:
                if copy.memory == saved.memory:
                    saved.take(copy)
        for copy in active:
            if any(copy.memory == other.memory for other in written) and count[copy.memory] > 1:
                _refuse_if_stale(copy)
        for copy in released:
            copy.active = False
        # What no batch refers to can be neither read nor written, so it can decide about no collective.
        self.copies = [copy for copy in copies if holders(copy.rows) > count[copy.memory]]

    def forget_unheld(self, copies: list[AliasedCopy]) -> None:
        """Forget the copies that the script holds on no rank; every rank must call it with the same copies."""
        for copy in copies:
            if not copy.spec.view.shares.synchronize(_are_held, copy):
                # What numpy has written to it has come into the rows uncounted.
                if self.numbers[copy.memory] != copy.number:
                    self._next(copy.memory)
                self.copies.remove(copy)

    def forget_stale(self, copies: list[AliasedCopy]) -> None:
        """Forget the copies that differ from the rows on some rank; every rank must call it with the same copies."""
        for copy in copies:
            if not copy.saved and copy.spec.view.shares.synchronize(_are_stale, copy):
                self._next(copy.memory)  # the write may have come into the rows uncounted
                self.copies.remove(copy)

    def _next(self, memory: int) -> int:
        self.numbers[memory] += 1
        return self.numbers[memory]

    @contextmanager
    def updated(self, arguments: list[Tensor], put_back: Any) -> Iterator[None]:
        """Around an operation that may write to its arguments: gather copies of written rows again (a collective).

        put_back: the value being assigned; `x[1:3] += 1` takes rows, adds, and assigns the same memory: if autograd
        has recorded that, the copy is not written through.
        """
        if isinstance(put_back, Tensor):
            self.copies = [copy for copy in self.copies if not copy.is_recorded(put_back)]
        for rows in arguments:
            self.write_back(rows)
        before = [self.version(rows) for rows in arguments]
        yield
        self.gather_stale([rows for rows, n in zip(arguments, before, strict=True) if self.version(rows) != n])

    def gather_stale(self, written: Sequence[Tensor] = ()) -> None:
        """Gather the copies again of whose memory rows were written (a collective)."""
        stale = [
            copy
            for copy in self.copies
            # `x.data` has a version of its own
            if any(same_memory(copy.rows, rows) for rows in written) or copy.rows_version() != copy.versions[0]
        ]
        self.forget_unheld(stale)
        for copy in stale:
            if copy in self.copies:
                copy.spec.view.shares.synchronize(_gather_again, copy)


def _form(tensor: Tensor) -> tuple[int, torch.Size, Strides]:
    """Return the place of a tensor's first element in its memory, its shape and its strides."""
    return int(tensor.storage_offset()), tensor.shape, tensor.stride()


def _refuse_if_stale(copy: AliasedCopy) -> None:
    # One that is still equal is not marked so: the values differ between ranks, which then decide about a gathering.
    if not copy.is_equal() and copy.is_held():
        raise _two_copies()


def _two_copies() -> Refused:
    return Refused(
        f"before {user_line()}, the script wrote to an array or a row of a batch while it held another one of "
        "the same memory, which does not show this; take the larger one first, or take it after the write"
    )


def _are_held(copies: list[AliasedCopy]) -> list[bool]:
    """Return for each local share whether the script holds a copy on any rank. copies: as for `_gather_again`."""
    return [copies[0].spec.view.shares.processes.is_true_anywhere(copies[0].is_held())] * len(copies)


def _are_stale(copies: list[AliasedCopy]) -> list[bool]:
    """Return for each local share whether a copy differs from a rank's rows. copies: as for `_gather_again`."""
    differs = any(not copy.is_equal() for copy in copies)
    return [copies[0].spec.view.shares.processes.is_true_anywhere(differs)] * len(copies)


def _gather_again(copies: list[AliasedCopy]) -> list[None]:
    """Gather the rows again into a copy, and return None for each local share.

    copies: the same copy as each local share knows it.
    """
    first = copies[0]
    counted = first.rows_version() != first.versions[0]  # else the script has written through `x.data`
    with torch.no_grad(), nullcontext() if counted else uncounted(first.full):
        full = first.spec.gather_shares([(copy.spec, copy.rows) for copy in copies])
        strides = first.rows.stride()
        without_repetitions(first.full, strides).copy_(without_repetitions(full, strides))
    for copy in copies:
        copy.mark_equal()
    return [None] * len(copies)


def version(tensor: Tensor) -> int:
    """Return the number of writes to a tensor's memory; 0 for a tensor of the inference mode, which has no count."""
    return 0 if tensor.is_inference() else version_of(tensor)


def holders(tensor: Tensor) -> int:
    """Return the number of tensors and arrays that share this tensor's memory."""
    return count_references(tensor)


def same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are views of the same memory."""
    if tensor.layout is not torch.strided or tensor.device != other.device:
        return False
    return memory_of(tensor) == memory_of(other)


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    """Return True if the memory of two tensors overlaps, of which one may have come from an array of the other's."""
    if other.layout is not torch.strided or tensor.device != other.device:
        return False
    here, there = tensor.untyped_storage(), other.untyped_storage()
    before = there.data_ptr() - here.data_ptr()
    return -there.nbytes() < before < here.nbytes()


def _has_memory_of(full: Tensor, leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not (is_transformed(leaf) or is_mapped_over(leaf)) and same_memory(leaf, full)
    if isinstance(leaf, np.ndarray):
        return bool(np.may_share_memory(leaf, full.detach().numpy()))
    return isinstance(leaf, (torch.UntypedStorage, torch.TypedStorage)) or type(leaf).__name__ == "PyCapsule"


def _equal(*tensors: Tensor) -> bool:
    """Return True if two tensors have the same bits: NaN equals itself, and 0.0 is not -0.0."""
    dense = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    return torch.equal(*(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in dense))
