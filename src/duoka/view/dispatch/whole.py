"""Compute a function without a rule whole: gather the batches, and compute on every rank what one device would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.private.torch import tree_map_only
from duoka.system.user_code import user_line
from duoka.view.aliased import AliasedCopy, holders, version
from duoka.view.dispatch.cached import add_alias, cache_copy, caches_written
from duoka.view.support.transforms import records_gradients
from duoka.view.tensor.batch import (
    Args,
    BatchTensor,
    Kwargs,
    MultiShareBatch,
    batches_in,
    join_results,
    laid_out,
    may_write,
    note_gathered,
    of_share,
)
from duoka.view.tensor.spec import Spec
from duoka.view.tensor.strides import without_repetitions


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
    if name in REFUSED:
        raise Refused(f"{name} of a batch cannot be split over ranks ({user_line()}){REFUSED[name]}")
    batches = batches_in((args, kwargs))
    with batches[0]._spec.view.whole_operations.timed(name):
        keep = name in _ROW_OPERATIONS or (name == "__setitem__" and caches_written(*args))
        writes = may_write(func, kwargs)
        copies = _gathered(batches, keep, shares_memory=writes)
        args, kwargs = tree_map_only(BatchTensor, lambda batch: copies[id(batch)].full, (args, kwargs))
        if name == "__dlpack__":  # which refers to the tensor itself, not to its memory
            args = (args[0].view_as(args[0]), *args[1:])
        try:
            out = func(*args, **kwargs)
        except Exception:
            for copy in copies.values() if writes else ():
                copy.refuse_another_form(name)  # `out=` is resized first
                copy.keep_what_was_written()
            raise
        bypasses_version = (
            name.endswith("_") and name.startswith("_") and not name.startswith("__")
        )  # counts no version
        written = [
            copy
            for copy in copies.values()
            if bypasses_version or not copy.is_unwritten() or (name in _UNCOUNTED and copy.full is args[0])
        ]
        for copy in copies.values():  # first those unwritten, as long as no tensor in `out` is a batch
            if copy not in written and not isinstance(out, BatchTensor):
                out = copy.returned(out)
        for copy in written:
            copy.refuse_another_form(name)
        for copy in written:
            out = copy.written_back(out)
        return out


def gather_sharing(tree: Any) -> Any:
    """All-gather the batches in nested containers; those of one memory share it, if one of them holds the others."""
    copies = _gathered(batches_in(tree), False, shares_memory=True)
    return tree_map_only(BatchTensor, lambda batch: copies[id(batch)].full, tree)


def _gathered(batches: list[BatchTensor], keep: bool, shares_memory: bool) -> dict[int, GatheredArgument]:
    """Gather batches, by identity. shares_memory: copies of one memory are parts of the largest of them."""
    copies: dict[int, GatheredArgument] = {}
    others: list[AliasedCopy] = []
    for batch in sorted(batches, key=_extent, reverse=True) if shares_memory else batches:
        copies[id(batch)] = copy = GatheredArgument(batch, keep, others)
        if shares_memory and len(batches) > 1:
            others.append(AliasedCopy(batch._shares[0]._rows, batch._spec, batch._meta.strides, copy.full))
    return copies


def take_row(batch: BatchTensor, index: int) -> Any:
    """Compute `batch[index]` whole; the fast path for loops over rows."""
    with batch._spec.view.whole_operations.timed("__getitem__"):
        copy = GatheredArgument(batch, keep=True)
        return copy.returned(copy.full[index])


class GatheredArgument:
    """A gathered copy of a batch, for one operation. keep: keep it for later operations on the batch.

    others: copies of which it is a part if it has their memory.
    """

    def __init__(self, batch: BatchTensor, keep: bool, others: Sequence[AliasedCopy] = ()) -> None:
        parts = [(share._spec, share._local) for share in batch._shares]
        spec, rows = parts[0]
        known = spec.view.aliased.of(rows, spec, batch._meta.strides, others)
        keep = keep and not spec.view.aliased.has_uncounted_writes
        if known is None and keep and batch._cached is not None:
            known = batch._cached.of(rows, spec.view.aliased)
        if known is None:
            records = records_gradients()  # before inference_mode(False) enables gradients
            with torch.inference_mode(False), torch.set_grad_enabled(records):  # its own tensors have no version
                known = laid_out(Spec.gather_shares(parts), batch._meta.strides)
                if spec.view.gathers_on is not None:  # the script's views of it are there
                    known = known.to(spec.view.gathers_on)
            note_gathered(batch, known)
            if keep:
                cache_copy(batch, known)
        self.batch, self.full, self._keeps = batch, known, keep
        self._version, self._holders = version(known), holders(known)

    def is_unwritten(self) -> bool:
        return version(self.full) == self._version

    def returned(self, out: Any) -> Any:
        """Return the result of an operation that wrote nothing, and keep track of views of the copy in it."""
        if out is self.full:
            return self.batch
        add_alias(self.batch, self.full, self._holders, out)
        return out

    def refuse_another_form(self, name: str) -> None:
        """Raise Refused if the operation has changed the shape or dtype of the copy."""
        if self.full.shape != self.batch.shape or self.full.dtype != self.batch.dtype:
            for aliased in (share._spec.view.aliased for share in self.batch._shares):
                aliased.copies = [copy for copy in aliased.copies if copy.full is not self.full]
            raise Refused(
                f"{name} at {user_line()} would change a batch's shape or dtype in place; use a function that "
                "returns a new tensor, and assign its result"
            )

    def written_back(self, out: Any) -> Any:
        """Copy what the operation wrote into the rows, and return its result."""
        shares = self.batch._shares
        view = self.batch._spec.view
        view.written += 1
        view.shares.each(lambda index: self._write(shares[index], shares[index]._local))
        if self._keeps:
            cache_copy(self.batch, self.full)
        return tree_map_only(Tensor, lambda leaf: self.batch if leaf is self.full else leaf, out)

    def keep_what_was_written(self) -> None:
        """Copy what an operation wrote before it raised an error into the rows; torch does not count it."""
        for share in self.batch._shares:
            self._write(share, share._local.data)

    def _write(self, share: BatchTensor, rows: Tensor) -> None:
        of_copy = share._spec.local_rows(self.full)
        without_repetitions(rows, rows.stride()).copy_(without_repetitions(of_copy, rows.stride()))


def _extent(batch: BatchTensor) -> int:
    """Return the distance in memory from the first element of a batch to its last."""
    return sum((size - 1) * stride for size, stride in zip(batch.shape, batch._meta.strides, strict=True))


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    return name if name != "__get__" else func.__self__.__name__  # type: ignore[attr-defined]


_UNCOUNTED = ("apply_", "map_", "map2_")  # torch counts no write
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
