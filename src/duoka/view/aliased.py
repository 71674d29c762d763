"""Gathered copies of batches that the script may hold a reference to: `row = x[0]`, `x.numpy()`.

On one device these share the batch's memory, so a write to one is visible in the other. Here a write to the copy is
copied into the rows before the batch is read again, and after a write to the rows the copy is gathered again. Of each
memory there is one copy that the script may hold, laid out as one device's memory: what the script takes of another
view of the batch is a part of it (`part_of_copy`). If the copy does not hold that part, all of the memory is gathered
into it (`_extend`).

A rank sees by reference counts whether its script holds a copy, and garbage collection may make that differ between
ranks. So it decides about no collective: the ranks forget a copy when they have agreed that none of them holds it.

Three classes describe gathered copies: a `GatheredArgument` (whole.py) serves one operation; a `CachedCopy`
(whole.py) is kept by its batch as long as both are equal; an `AliasedCopy` is one whose memory the script
holds. Why: docs/decisions/0020-gathered-copies.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from duoka.errors import Refused
from duoka.private.torch import base_of, memory_of, negative_of, set_version, uncounted, version_of
from duoka.system.user_code import user_line
from duoka.view.copy_memory import CopyMemory, Parts
from duoka.view.memory import (
    as_in_memory,
    equal_bits,
    gradient_version,
    holders,
    is_of_leaf,
    offset_in_batch,
    overlap,
    same_memory,
    version,
    whole_memory,
)
from duoka.view.shares.strides import Strides, contiguous_strides, covers, global_distance, overwrite
from duoka.view.transforms import records_gradients, without_modes

if TYPE_CHECKING:
    from duoka.view.tensor.spec import Spec


@dataclass(slots=True, eq=False)
class AliasedCopy:
    """A gathered copy `full` of a rank's `rows`."""

    rows: Tensor
    spec: Spec
    strides: Strides  # of the batch, which `full` has
    copied: CopyMemory
    written_back: Callable[[], None] | None = None  # called after rows were updated from the copy
    versions: tuple[int, int] = (0, 0)  # of rows and copy when they were last equal
    added: int | None = None  # the gradient's version then, if the rows are of its memory
    memory: int = 0  # of the rows
    active: bool = True  # False if this rank has seen that its script no longer holds the copy
    saved: bool = False  # by autograd on some rank; on others it may have no values
    parted: bool = False  # True if the rows got a write that autograd has recorded for the copy: they descend from it

    def __post_init__(self) -> None:
        self.memory = memory_of(self.rows)
        self.mark_equal()

    @property
    def full(self) -> Tensor:
        """The copy."""
        return self.copied.full

    def mark_equal(self) -> None:
        """Note that rows and copy are equal now."""
        self.versions, self.added = (self.rows_version(), version(self.full)), gradient_version(self.rows)
        self.copied.mark_equal()
        self.spec.view.saved.note_equal(self.rows, self.full)

    def rows_are_newer(self) -> bool:
        """Return True if the rows were written since they were equal to the copy, also as a gradient by a pass."""
        added = gradient_version(self.rows)
        return self.rows_version() != self.versions[0] or (added is not None and added != self.added)

    def rows_version(self) -> int:
        """Return the number of writes to the rows."""
        return self.spec.view.aliased.version(self.rows)

    def offset(self) -> int:
        """Return the bytes from the start of the batch's memory to the first element of the copy."""
        return offset_in_batch(self.rows, self.spec, self.strides) * self.rows.itemsize

    def part_of_copy(self, rows: Tensor, spec: Spec, strides: Strides) -> Tensor | None:
        """Return the part of `full` that is the copy of `rows`, of the same memory; None if it does not hold them.

        strides: of the batch whose rows these are. All ranks get the same answer.
        """
        full, partition, size, of = self.full, self.spec.partition, rows.itemsize, self.rows.itemsize
        sample = self.strides[self.spec.dim] * self.spec.inner * of  # in bytes, as are all distances here
        if spec.partition is not partition or strides[spec.dim] * spec.inner * size != sample:
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
        part = part.conj() if rows.is_conj() else part
        return negative_of(part) if rows.is_neg() else part

    def is_written(self, read: Tensor | None) -> bool:
        """Return True if the script has written to the copy since it was equal to the rows.

        read: the tensor about to be read, if not all are. A write that torch does not count (by numpy, through
        `.data`) matters only if that tensor would show it on one device. On a GPU any copy may be written: to compare
        would make the host wait, and to write equal values does not.
        """
        if version(self.full) != self.versions[1]:
            return True
        if self.rows_are_newer():
            return False
        replaced = self.spec.view.aliased.has_replaced_data
        if not (replaced or read is None or same_memory(self.rows, read)) and self.copied.is_held():
            return False
        return not self.full.is_cpu or not equal_bits(self._rows_of_copy().to(self.rows.device), self.rows)

    def write_through(self) -> None:
        """Update the rows from the gathered copy, to which the script has written.

        Raises:
            Refused: the write has a gradient, and the script holds several copies of these rows.
        """
        if version(self.full) == self.versions[1]:
            self._write(self.rows.data)  # without counting a write, as on one device
            return
        number = self.rows_version() + version(self.full) - self.versions[1]
        recorded = self.copied.recorded() if self.copied.is_recorded() else []
        for known in recorded:
            for original in known.originals:
                if original.key[0] == self.memory:
                    original.record(known.tensor)
        with uncounted(self.rows):
            self.write_values()
        set_version(self.rows, max(number, self.rows_version()))
        self.mark_equal()
        self.parted |= bool(recorded)
        if self.written_back is not None:
            self.written_back()

    def count_writes(self) -> None:
        """Count what the script has written to the copy as writes to the rows."""
        set_version(self.rows, self.rows_version() + version(self.full) - self.versions[1])

    def write_values(self) -> None:
        """Copy the values of the gathered copy into the rows."""
        with torch.inference_mode(self.rows.is_inference()), torch.no_grad():
            self._write(self.rows)

    def take(self, other: AliasedCopy) -> None:
        """Copy the values of another copy of the same memory, if one of them holds all of the other."""
        source: Tensor | None = other.part_of_copy(self.rows, self.spec, self.strides)
        target: Tensor | None = self.full
        if source is None:
            source, target = other.full, self.part_of_copy(other.rows, other.spec, other.strides)
        if target is not None:
            with torch.no_grad(), uncounted(self.full):
                overwrite(target, source.detach())
            self.mark_equal()

    def extended(self) -> tuple[Spec, Tensor, int] | None:
        """Return placement and rows of all of the batch's memory, and the place of its first element in the copy's.

        None if a sample's elements are not side by side in it, or if the copy's memory has no room for it.
        """
        memory = whole_memory(self.rows, self.spec, self.strides)
        if memory is None:
            return None
        spec, rows = memory
        start = int(self.full.storage_offset()) - self.offset() // self.rows.itemsize
        room = self.full.untyped_storage().nbytes() // self.full.itemsize
        return None if start < 0 or start + spec.size * rows.shape[1] > room else (spec, rows, start)

    def recorded_rows(self, base: Tensor | None) -> Tensor:
        """Return the rows, with the history that a write to their base has if autograd records it."""
        recorded = base is not None and records_gradients() and base.requires_grad and not base.is_leaf
        if base is None or not recorded or base.dtype != self.rows.dtype or base.is_conj() or base.is_neg():
            return self.rows
        return base.as_strided(self.rows.shape, self.rows.stride(), self.rows.storage_offset())

    def _write(self, rows: Tensor) -> None:
        overwrite(rows, self._rows_of_copy())

    def _rows_of_copy(self) -> Tensor:
        return self.spec.local_rows(self.full.detach())


class AliasedCopies:
    """The gathered copies of the batches of a view that the script may hold on some rank; nearly always none."""

    def __init__(self) -> None:
        # The same on all ranks for each batch that the script can reach; read by _replay.c.
        self.copies: list[AliasedCopy] = []
        self.has_uncounted_writes = False  # True once the script has used `x.data`: torch counts no write through it
        # True once the script has set `x.data`: x counts its writes with what shared its earlier memory, for which a
        # write to x would hide an uncounted one.
        self.has_replaced_data = False
        # Memory of tensors of the inference mode, which count no writes -> calls that may have written to it.
        self.unnumbered: Counter[int] = Counter()
        # Memory of rows -> number of the copies of it that the script has got.
        self.numbers: Counter[int] = Counter()

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
            overlap(copy.full, tensor) for rows in batches for copy in self.of_memory(rows) for tensor in others
        )

    def add(
        self,
        rows: Tensor,
        spec: Spec,
        strides: Strides,
        copied: CopyMemory,
        written_back: Callable[[], None] | None = None,
    ) -> None:
        """Keep a copy of `rows`, whose memory the script gets.

        strides: of the batch. written_back: called whenever writes to the copy have been copied into the rows.
        """
        known = self.held(rows)
        if known is not None:
            known.active |= known.copied is copied
            return
        with without_modes():
            self.copies.append(AliasedCopy(as_in_memory(rows), spec, strides, copied, written_back))
        self.numbers[memory_of(rows)] += 1

    def mark_gradient(self, rows: Tensor) -> None:
        """Note that the script gets the memory of a gradient. `x.grad.data` does not count what passes add to it."""
        rows.untyped_storage().duoka_gradient = TensorWeakRef(rows)  # type: ignore[attr-defined]
        for copy in self.of_memory(rows):
            copy.added = gradient_version(rows)

    def part_from(self, rows: Tensor) -> None:
        """Let copies of the memory of these rows, which get other memory, count no writes to that.

        A copy of which only garbage has the memory would be out of date on the ranks that have not collected it.
        """
        for copy in self.of_memory(rows):
            written = copy.rows_version() - copy.versions[0]
            copy.rows = copy.rows.data
            copy.versions = copy.rows_version() - written, copy.versions[1]

    def held(self, rows: Tensor) -> AliasedCopy | None:
        """Return the copy of the memory of these rows that the script may hold, if there is one."""
        return next((copy for copy in self.of_memory(rows) if not copy.saved), None)

    def rows_of(self, full: Tensor, spec: Spec) -> Tensor | None:
        """Return the rows of which a plain tensor is the copy that the script holds."""
        for copy in self.copies:
            same = copy.full.data_ptr() == full.data_ptr() and copy.full.stride() == full.stride()
            if same and copy.full.shape == full.shape and copy.full.dtype == full.dtype and copy.spec == spec:
                return None if copy.saved else copy.rows.detach()
        return None

    def of(
        self, parts: Parts, strides: Strides, others: Sequence[AliasedCopy] = (), records: bool = False
    ) -> Tensor | None:
        """Return the existing copy of these rows, a part of it; None if there is none that holds it.

        others: further copies of their memory, which the script does not hold. records: as for `CopyMemory.keep`.
        """
        spec, rows = parts[0]
        known = self.held(rows)
        for copy in [*([known] if known is not None else []), *others]:
            # Kept for calls in other modes.
            with without_modes(), torch.inference_mode(False), torch.enable_grad():
                part = copy.part_of_copy(rows, spec, strides)
                part = None if part is None else part.detach()
            if part is not None:
                for of, rows in parts:
                    if (held := of.view.aliased.held(rows)) is not None:
                        held.active = True
                return copy.copied.keep(part, parts, records)
        return None

    def write_back(self, rows: Tensor | None = None) -> None:
        """Copy writes to copies into the rows; called before these rows are read, and at the end of the script.

        Raises:
            Refused: see `AliasedCopy.write_through`.
        """
        copies, self.copies = self.copies, []  # `_local` of what is read here comes here again
        try:
            self._write_back(copies, rows)
        except Refused:
            self.copies = copies  # whichever share raises it first, all refuse what comes next
            raise

    def _write_back(self, copies: list[AliasedCopy], rows: Tensor | None) -> None:
        active = [copy for copy in copies if copy.active]
        released = [copy for copy in active if not copy.copied.is_held()]
        written = [copy for copy in active if copy.is_written(rows)]
        for copy in written:
            copy.write_through()
        # A write that is not counted is seen only on the rank whose rows it changes. So before a pass, which reads
        # what autograd has saved, and when an array is gone, every rank takes all of its values.
        sources = [
            copy for copy in active if not copy.saved and (copy in written or rows is None or copy in released)
        ]
        for saved in [copy for copy in copies if copy.saved] if sources else []:
            for copy in sources:
                if copy.memory == saved.memory:
                    saved.take(copy)
        for copy in released:
            copy.active = False
        # What no batch refers to can be neither read nor written, so it can decide about no collective.
        count = Counter(copy.memory for copy in copies)
        self.copies = [copy for copy in copies if holders(copy.rows) > count[copy.memory]]

    def extend(self, rows: Tensor) -> None:
        """Gather all of these rows' memory into its copy, if the script holds that on any rank; else forget it.

        Every rank must call it, when the copy does not hold what the script takes.

        Raises:
            Refused: duoka does not know where the rest of the memory is.
        """
        copy = self.held_anywhere(rows)
        if copy is not None:
            copy.spec.view.shares.synchronize(_extend, copy)

    def held_anywhere(self, rows: Tensor) -> AliasedCopy | None:
        """Return the copy of the memory of these rows that a script holds on any rank; every rank must call it."""
        copy = self.held(rows)
        if copy is not None:
            self.forget_unheld([copy])
        return copy if copy in self.copies else None

    def refuse_parted(self, rows: Tensor) -> None:
        """Raise Refused before a gradient of these rows is asked for which lacks that of what was taken of them.

        Every rank must call it.
        """
        copy = self.held(rows)
        if copy is not None and copy.parted and self.held_anywhere(rows) is not None:
            raise Refused(
                f"{user_line()} asks for the gradient of a batch of which the script holds rows (`row = x[i]`) that "
                "were written into with a gradient; write through the batch itself instead: `x[i] = value`"
            )

    def forget_unheld(self, copies: list[AliasedCopy]) -> None:
        """Forget the copies that the script holds on no rank; every rank must call it with the same copies."""
        for copy in copies:
            if not copy.spec.view.shares.synchronize(_are_held, copy):
                self.copies.remove(copy)

    @contextmanager
    def updated(self, arguments: list[Tensor], put_back: Any) -> Iterator[None]:
        """Around an operation that may write to its arguments: gather copies of written rows again (a collective).

        put_back: as for `write_back_before`.
        """
        self.write_back_before(arguments, put_back)
        before = [self.version(rows) for rows in arguments]
        yield
        self.gather_stale([rows for rows, n in zip(arguments, before, strict=True) if self.version(rows) != n])

    def write_back_before(self, arguments: list[Tensor], put_back: Any) -> None:
        """Copy writes to copies into the arguments of an operation.

        put_back: the value being assigned; `x[1:3] += 1` takes rows, adds, and assigns the same memory. If autograd
        has recorded that, the assignment writes it to the batch.
        """
        for copy in self.copies if type(put_back) is Tensor else ():
            if same_memory(put_back, copy.full) and copy.copied.is_recorded():
                if any(is_of_leaf(rows) for rows in arguments):  # torch refuses the write before
                    copy.spec.view.shares.synchronize(_gather_again, (copy, None))
                else:
                    copy.count_writes()
                copy.mark_equal()
        for rows in arguments:
            self.write_back(rows)

    def gather_stale(self, written: Sequence[Tensor] = ()) -> None:
        """Gather the copies again of whose memory rows were written (a collective)."""
        stale = [
            copy
            for copy in self.copies
            # `x.data` has a version of its own
            if any(same_memory(copy.rows, rows) for rows in written) or copy.rows_are_newer()
        ]
        self.forget_unheld(stale)
        for copy in stale:
            if copy in self.copies:
                bases = (base_of(rows) for rows in written if same_memory(copy.rows, rows))
                copy.spec.view.shares.synchronize(_gather_again, (copy, next(bases, None)))


def _are_held(copies: list[AliasedCopy]) -> list[bool]:
    """Return for each local share whether the script holds a copy on any rank. copies: as for `_gather_again`."""
    return [copies[0].spec.view.shares.processes.is_true_anywhere(copies[0].copied.is_held())] * len(copies)


def _extend(copies: list[AliasedCopy]) -> list[None]:
    """Gather all of the batch's memory into the copy, and return None for each local share.

    copies: as for `_gather_again`.
    """
    first, extended = copies[0], [copy.extended() for copy in copies]
    whole = [part for part in extended if part is not None]
    if first.spec.view.shares.processes.is_true_anywhere(len(whole) < len(copies)):
        raise Refused(
            f"{user_line()} takes memory of a batch of which the script holds another view already; take both of the "
            "batch itself, or clone one of them"
        )
    values = first.spec.gather_shares([(spec, rows) for spec, rows, _ in whole])
    with torch.no_grad(), uncounted(first.full):
        first.copied.extend(values.shape, whole[0][2]).copy_(values)
    for copy, (spec, rows, _) in zip(copies, whole, strict=True):
        copy.rows, copy.spec, copy.strides = rows, spec, contiguous_strides(values.shape)
        copy.mark_equal()
    return [None] * len(copies)


def _gather_again(parts: list[tuple[AliasedCopy, Tensor | None]]) -> list[None]:
    """Gather the rows again into a copy, and return None for each local share.

    parts: the same copy as each local share knows it, and the base of the rows that were written.
    """
    first, base = parts[0]
    counted = first.rows_version() != first.versions[0]  # else the script has written through `x.data`
    full = first.spec.gather_shares([(copy.spec, copy.recorded_rows(of)) for copy, of in parts])
    number = version(first.full)
    with torch.no_grad(), uncounted(first.full):
        overwrite(first.full, full)
    if base is not None and full.requires_grad:
        first.copied.record_write(base, full)
        for copy, _ in parts:
            copy.parted = False
    set_version(first.full, max(number + 1, version(first.rows)) if counted else number)
    for copy, _ in parts:
        copy.mark_equal()
    return [None] * len(parts)
