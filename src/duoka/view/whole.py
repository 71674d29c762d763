"""Compute a function without a rule whole: gather the batches, and compute on every rank what one device would.

A batch keeps the gathered copy, so that a loop over its rows gathers once and runs at one device's speed. While the
copy is equal to the batch, `x[i]`, `x[i, :3]` and `x[i] = value` use it directly, without a rule. A write is copied
into the rows before they are read again (`duoka.view.aliased`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from duoka.errors import Refused
from duoka.private.torch import (
    base_of,
    is_view,
    memory_of,
    negative_of,
    set_version,
    tree_leaves,
    tree_map_only,
    uncounted,
)
from duoka.system.user_code import user_line
from duoka.view.aliased import AliasedCopies, AliasedCopy
from duoka.view.copy_memory import CopyMemory, Parts, refuse_lost_hook
from duoka.view.memory import (
    as_in_memory,
    blocks_of_memory,
    has_memory_of,
    history,
    holders,
    is_of_leaf,
    offset_in_batch,
    physical,
    same_memory,
    version,
)
from duoka.view.shares.layout import StraightThrough, laid_out
from duoka.view.shares.strides import overwrite
from duoka.view.tensor.batch import (
    Args,
    BatchTensor,
    Kwargs,
    MultiShareBatch,
    batches_in,
    join_results,
    may_write,
    note_gathered,
    of_share,
)
from duoka.view.tensor.outcome import note_backward_name
from duoka.view.tensor.spec import Spec
from duoka.view.transforms import operators_are_observed, records_gradients, without_modes


def compute_whole(func: Callable[..., Any], args: Args, kwargs: Kwargs, name: str = "") -> Any:
    """Gather all batches among the arguments, and call `func`: always right, but no faster than one device.

    Writes to a gathered batch are copied back into each rank's rows. name: of the operation, shown to the user;
    default: torch's.

    Raises:
        Refused: the operation is one of REFUSED, or changes a batch's shape or type in place.
    """
    name = name or _name_of(func)
    first = batches_in((args, kwargs))[0]
    shares = first._spec.view.shares
    if type(first) is MultiShareBatch or not shares.several:
        return _compute_whole(name, func, args, kwargs)

    def call_whole(calls: list[Any]) -> list[Any]:  # called in one of several shares, of which all make the call
        args, kwargs = join_results(calls)
        out = _compute_whole(name, func, args, kwargs)
        return [of_share(out, index) for index in range(shares.count)]

    return shares.synchronize(call_whole, (args, kwargs))


def _compute_whole(name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    if (refused := REFUSED.get(name.removeprefix("aten::"))) is not None:
        raise Refused(f"{name} of a batch cannot be split over ranks ({user_line()}){refused}")
    batches = batches_in((args, kwargs))
    with batches[0]._spec.view.whole_operations.timed(name):
        keep = name in _ROW_OPERATIONS or (name == "__setitem__" and caches_written(*args))
        writes = may_write(func, kwargs)
        targets = batches_in(args[:1] if kwargs.get("out") is None else kwargs["out"]) if writes else []
        with torch.no_grad() if name in _RETURN_NUMBERS else nullcontext():
            copies = _gathered(batches, keep, {id(batch) for batch in targets})
        args, kwargs = tree_map_only(BatchTensor, lambda batch: copies[id(batch)].argument, (args, kwargs))
        if name in ("__dlpack__", "_to_dlpack"):  # which refers to the tensor itself, not to its memory
            args = (args[0][...], *args[1:])
        try:
            out = func(*args, **kwargs)
        except Exception:
            for copy in [copy for copy in copies.values() if writes or not copy.is_unwritten()]:
                copy.refuse_another_form(name)  # `out=` is resized first
                copy.keep_what_was_written()
            raise
        bypasses_version = (
            name.endswith("_") and name.startswith("_") and not name.startswith("__")
        )  # counts no version
        written = [
            copy
            for copy in copies.values()
            if bypasses_version or not copy.is_unwritten() or _may_write_uncounted(name, copy.argument, args, kwargs)
        ]
        kept = _kept_by_functions(out)
        for copy in copies.values():
            if copy not in written and out is not copy.argument:
                copy.note_views(out)
                copy.note_views(kept)
        for copy in written:
            copy.refuse_another_form(name)
        for copy in written:
            copy.write_back()
        # Also in a list: atleast_2d([x]).
        returned = {id(copy.argument): copy.batch for copy in reversed(copies.values())}
        others = [leaf for leaf in tree_leaves(out) if id(leaf) not in returned]
        for copy in written:  # a function of the script may return a view of what it has written to
            copy.note_views(others)
        if any(id(leaf) in returned for leaf in tree_leaves(out)):
            out = tree_map_only(Tensor, lambda leaf: returned.get(id(leaf), leaf), out)
        return out


def _kept_by_functions(out: Any) -> list[dict[str, Any]]:
    """Return what Functions of the script, of which these are results, keep beside saved tensors: `ctx.x = x`."""
    nodes: list[Any] = [leaf.grad_fn for leaf in tree_leaves(out) if type(leaf) is Tensor]
    return [vars(node) for node in nodes if isinstance(node, BackwardCFunction)]


def gather_sharing(
    tree: Any,
    but: Callable[[BatchTensor], bool] = lambda batch: False,
    made: Callable[[BatchTensor, Tensor], Tensor] = lambda batch, full: full,
) -> Any:
    """All-gather the batches in nested containers; those of one memory share it, if one of them holds the others.

    but: returns True for those that stay as they are. made: returns what takes the place of a batch.
    """
    batches = [batch for batch in batches_in(tree) if not but(batch)]
    copies = _gathered(batches)
    whole = {id(batch): made(batch, copies[id(batch)].argument) for batch in batches}
    return tree_map_only(BatchTensor, lambda batch: batch if but(batch) else whole[id(batch)], tree)


def _gathered(
    batches: list[BatchTensor], keep: bool = False, written: Container[int] = ()
) -> dict[int, GatheredArgument]:
    """Gather batches, by identity; copies of one memory are parts of the largest of them.

    keep, written: as for `GatheredArgument`; of which batches, by identity.
    """
    copies: dict[int, GatheredArgument] = {}
    others: defaultdict[int, list[AliasedCopy]] = defaultdict(list)  # by memory
    batches = list({id(batch): batch for batch in batches}.values())  # an argument may come twice
    for batch in sorted(batches, key=_extent, reverse=True):
        rows = batch._shares[0]._rows
        alike = others[memory_of(rows)]
        copies[id(batch)] = copy = GatheredArgument(batch, keep, id(batch) in written, alike)
        if any(copy.argument is other.argument for other in copies.values() if other is not copy):
            copy.argument = copy.argument[...]  # `torch.sin(x, out=v)` returns v, not x
        if len(batches) > 1:
            alike.append(AliasedCopy(as_in_memory(rows), batch._spec, batch._meta.strides, copy.memory))
    return copies


def take_row(batch: BatchTensor, index: int) -> Any:
    """Compute `batch[index]` whole; the fast path for loops over rows."""
    with batch._spec.view.whole_operations.timed("__getitem__"):
        copy = GatheredArgument(batch, keep=True)
        row = copy.argument[index]
        copy.note_views(row)
        return row


class GatheredArgument:
    """A gathered copy of a batch, for one operation.

    keep: keep it for later operations on the batch. writes: the operation may write to the batch. others: copies
    of the batch's memory, of which it may be a part.
    """

    full: Tensor  # the copy
    argument: Tensor  # what the operation gets: the copy, or the same memory (`_requiring_grad_as`)

    def __init__(
        self, batch: BatchTensor, keep: bool, writes: bool = False, others: Sequence[AliasedCopy] = ()
    ) -> None:
        with without_modes():  # a transform refuses writes to tensors that it does not know
            batch._spec.view.shares.each(lambda index: batch._shares[index]._local)  # may have a gradient to record
        parts = _parts(batch)
        spec, rows = parts[0]
        aliased, strides = spec.view.aliased, batch._meta.strides
        keep = keep and not (aliased.has_uncounted_writes or operators_are_observed())
        known = batch._cached.of(rows, aliased) if keep and batch._cached is not None else None
        if known is None:
            records = rows.requires_grad and records_gradients()
            shows_history = records and not (operators_are_observed() or (writes and is_of_leaf(rows)))
            full = aliased.of(parts, strides, others, shows_history)
            if full is None and aliased.held(rows) is not None:
                _extend_copy(batch)
                full = aliased.of(parts, strides, (), shows_history)
            if full is None or (records and not full.requires_grad):
                known = _gather(batch, parts, full)
                if full is None:
                    set_version(known, version(rows))
                note_gathered(batch, known)
            else:
                known = full
            if keep:
                cache_copy(batch, known)
        self.batch, self.full, self._keeps, self._writes = batch, known, keep, writes
        self._version, self._grad_fn = version(known), history(known)
        self._versions_of_rows = [version(share._rows) for share in batch._shares]
        self.memory = _memory_of(known, parts, others)
        # torch refuses a write to a leaf before it writes or draws, as on one device.
        self.argument = _requiring_grad_as(rows, known.detach() if writes and is_of_leaf(rows) else known)

    def is_unwritten(self) -> bool:
        return version(self.full) == self._version

    def note_views(self, out: Any) -> None:
        """Keep track of views of the copy in the result of an operation."""
        add_alias(self.batch, self.full, self.memory, out)

    def refuse_another_form(self, name: str) -> None:
        """Raise Refused if the operation has changed the shape or dtype of the copy."""
        if self.argument.shape != self.batch.shape or self.argument.dtype != self.batch.dtype:
            for aliased in (share._spec.view.aliased for share in self.batch._shares):
                aliased.copies = [copy for copy in aliased.copies if not same_memory(copy.full, self.full)]
            raise Refused(
                f"{name} at {user_line()} would change a batch's shape or dtype in place; use a function that "
                "returns a new tensor, and assign its result"
            )

    def write_back(self) -> None:
        """Copy what the operation wrote into the rows."""
        view = self.batch._spec.view
        view.written += 1
        recorded = history(self.full) is not self._grad_fn  # `nn.init.normal_` writes without
        try:
            with torch.set_grad_enabled(recorded and torch.is_grad_enabled()):
                view.shares.each(self._write_back)
        except RuntimeError:
            if not self._writes:  # a Function of the script has written to a leaf; torch refuses it before it writes
                self.keep_what_was_written()
            raise
        if self._keeps:
            cache_copy(self.batch, self.full)

    def _write_back(self, index: int) -> None:
        share = self.batch._shares[index]
        aliased = share._spec.view.aliased
        if torch.is_grad_enabled():
            refuse_lost_hook(share._rows)
        held = aliased.held(share._rows)
        held = held if held is not None and held.copied is self.memory else None
        if held is not None:
            with uncounted(held.rows):
                held.write_values()  # the operation may have written to another view of the memory, too
        # Of a write that torch does not count, cached copies learn by another number.
        with uncounted(share._rows) if self.is_unwritten() else nullcontext():
            self._write(share, share._rows)
        if torch.is_grad_enabled():
            note_backward_name(share._rows, self.full)
        aliased.numbers[memory_of(share._rows)] += self.is_unwritten()
        number = self._versions_of_rows[index] + version(self.full) - self._version
        # By a smaller number torch could take the history that a view had before for that of the write.
        if not self.is_unwritten() and (number > version(share._rows) or not base_of(share._rows).requires_grad):
            set_version(share._rows, number)
        if held is not None:
            held.mark_equal()
        share._spec.view.saved.note_equal(share._rows, self.full)

    def keep_what_was_written(self) -> None:
        """Copy what an operation wrote before it raised an error into the rows.

        torch counts no write of a function that raises, but those that a Function of the script had made before.
        """
        # To a leaf that requires a gradient only Functions write: torch refuses that before.
        if not (is_of_leaf(self.batch._shares[0]._rows) and self.is_unwritten()):
            with torch.no_grad():
                self.batch._spec.view.shares.each(self._write_back)

    def _write(self, share: BatchTensor, rows: Tensor) -> None:
        overwrite(rows, share._spec.local_rows(self.full))


def _gather(batch: BatchTensor, parts: list[tuple[Spec, Tensor]], part: Tensor | None) -> Tensor:
    """All-gather the rows of all shares into memory that is laid out as one device's, and return the copy.

    part: a copy of the batch without its gradients, if there is one; the result shares its memory.
    """
    spec, rows = parts[0]
    records = records_gradients()  # before inference_mode(False) enables gradients
    with torch.inference_mode(False), torch.set_grad_enabled(records):  # its own tensors have no version
        if not records:  # torch computes with no view of several (`x.unbind()`) whose base was written to
            with without_modes():
                parts = [(spec, rows.detach()) for spec, rows in parts]
        full = Spec.gather_shares([(spec, physical(rows)) for spec, rows in parts])
        if (device := spec.view.gathers_on or batch._shown_device) is not None:  # the script's views of it are there
            full = full.to(device)
        if part is None or operators_are_observed():
            with without_modes():  # a tensor that a transform makes has no memory of its own
                full = laid_out(full, batch._meta.strides, *_place_in_memory(batch))
                if full.requires_grad and is_view(full) and not is_view(rows):
                    full = StraightThrough.apply(full, full)  # a write to a view has another name (CopySlices)
        else:
            full = StraightThrough.apply(full, physical(part))
        if not full.requires_grad:
            with without_modes():
                full = full.detach()  # a view that is made here under `no_grad` could not be written with a gradient
        full = full.conj() if rows.is_conj() else full
        return negative_of(full) if rows.is_neg() else full


def _place_in_memory(batch: BatchTensor) -> tuple[int, int]:
    """Return the offset of a batch in one device's memory of all samples, and the size of that, in elements.

    Return zeros if the memory is no sequence of whole samples.
    """
    rows, spec, strides = batch._shares[0]._rows, batch._spec, batch._meta.strides
    blocks = blocks_of_memory(rows, spec, strides)
    return (0, 0) if blocks is None else (offset_in_batch(rows, spec, strides), blocks[0].size * blocks[1])


def _memory_of(known: Tensor, parts: Parts, others: Sequence[AliasedCopy]) -> CopyMemory:
    """Return what is known of the memory of a copy; of a new one, the references to it that there are now."""
    spec, rows = parts[0]
    held = spec.view.aliased.held(rows)
    for copy in [*([held] if held is not None else []), *others]:
        if same_memory(copy.full, known):
            return copy.copied
    return CopyMemory(known, parts, holders(known))


def _requiring_grad_as(rows: Tensor, copy: Tensor) -> Tensor:
    """Return a gathered copy, or a tensor of its memory that requires gradients, as the rows do.

    A copy that was gathered while autograd records nothing requires none; on one device a view of the batch does.
    """
    if copy.requires_grad or not base_of(rows).requires_grad:
        return copy
    with without_modes(), torch.inference_mode(False):
        return copy.detach().requires_grad_()


def _extend_copy(batch: BatchTensor) -> None:
    """Let the copy of a batch's memory hold all of it, if the script has that; else forget the copy."""
    shares = batch._shares
    with without_modes():
        batch._spec.view.shares.each(lambda index: shares[index]._spec.view.aliased.extend(shares[index]._rows))


def _extent(batch: BatchTensor) -> int:
    """Return the distance in memory from the first element of a batch to its last."""
    return sum((size - 1) * stride for size, stride in zip(batch.shape, batch._meta.strides, strict=True))


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    return name if name != "__get__" else func.__self__.__name__  # type: ignore[attr-defined]


def _may_write_uncounted(name: str, argument: Tensor, args: Args, kwargs: Kwargs) -> bool:
    """Return True for an argument to which torch may write without counting that."""
    if "batch_norm" in name:
        return argument.dim() == 1  # running statistics
    if name in ("apply_", "map_", "map2_"):
        return argument is args[0]
    out = kwargs.get("out")  # `torch.kron` counts no write to it
    return out is not None and any(argument is leaf for leaf in tree_leaves(out))


_RETURN_NUMBERS = (
    "tolist",
    "item",
    "equal",
    "allclose",
    "__bool__",
    "__int__",
    "__float__",
    "__complex__",
    "__index__",
)
_ROW_OPERATIONS = ("__getitem__", "select", "narrow", "unbind", "split", "chunk")

# Operations whose effect would be lost with the copy, and what to do instead.
REFUSED = {
    "__set__": "; set it before the batch is made",
    "__delete__": "",
    "set_": "; write `x = y`",
    "share_memory_": "; a parameter that is shared before its model is moved to a device or called stays whole",
    "is_set_to": "",
    "register_post_accumulate_grad_hook": "; do what it does after backward() instead",
}


_PARTS = (int, slice, type(None), type(Ellipsis), Tensor)


@dataclass(eq=False)
class CachedCopy:
    """A gathered copy, `full`, of a rank's `rows`, and the numbers that show whether both are still equal."""

    rows: Tensor
    full: Tensor
    pointer: int  # address of the rows' data
    memory: int  # of the copy (`memory_of`)
    versions: tuple[int, int]  # write counts of `rows` and `full` when these were last equal
    # The entry of `AliasedCopies.numbers` for the rows' memory at that time. A different entry now means that a write
    # through another copy may have changed the rows without changing their version.
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
        if any(copy.copied.memory != self.memory for copy in aliased.of_memory(rows)):
            return None
        return self.full if self.full.requires_grad == (rows.requires_grad and records_gradients()) else None


def _parts(batch: BatchTensor) -> Parts:
    return [(share._spec, share._rows) for share in batch._shares]


def cache_copy(batch: BatchTensor, full: Tensor) -> None:
    """Keep a copy that equals the batch."""
    rows, aliased = batch._shares[0]._rows, batch._spec.view.aliased
    now = CachedCopy(rows, full, rows.data_ptr(), memory_of(full), (0, 0), aliased.numbers[memory_of(rows)])
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
        return (_requiring_grad_as(batch._rows, full) if batch._rows.requires_grad else full)[index]
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
    if len(here) > 1 or (alias is not None and alias.copied.memory != cached.memory):
        return False
    if alias is not None and not (rows.requires_grad or cached.full.requires_grad):
        if alias.versions[0] != aliased.version(rows):  # the copy may have been written to since
            return False
    elif cached.of(rows, aliased) is None:
        return False
    if alias is None:
        add_alias(batch, cached.full, CopyMemory(cached.full, _parts(batch), holders(cached.full)), cached.full)
    else:
        alias.active = True  # the script gets it again
    return True


def add_alias(batch: BatchTensor, full: Tensor, memory: CopyMemory, out: Any) -> None:
    """Keep track of the copy `full` of a batch, if the result `out` that the script gets shares its memory."""
    if not has_memory_of(memory.full, out):
        return
    memory.keep(full, _parts(batch))
    cached = batch._cached if batch._cached is not None and batch._cached.full is full else None
    for share in batch._shares:
        meta, aliased = share._meta, share._meta.spec.view.aliased
        if isinstance(out, np.ndarray):  # writes to it are not counted, as those through `x.data`
            share._spec.view.saved.add(share._rows)
        written_back = partial(_mark_equal, ref(cached), aliased) if cached is not None else None
        aliased.add(share._rows, meta.spec, meta.strides, memory, written_back)
    if cached is not None:
        cache_copy(batch, full)
