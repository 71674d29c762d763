"""Writes to a batch from an overlapping part of the same memory: `x[:, 1:] += x[:, :-1]`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from duoka.private.torch import set_version, tree_map_only
from duoka.view.dispatch.replay import DescribedCall
from duoka.view.memory import same_memory, version
from duoka.view.shares.layout import StraightThrough
from duoka.view.shares.strides import is_dense
from duoka.view.tensor.batch import BatchTensor
from duoka.view.whole import compute_whole

_SETITEM = Tensor.__setitem__


def writes_beside(call: DescribedCall) -> bool:
    """Return True if a call may write to a batch from an overlapping part of it, and a rank has a single row of it.

    torch refuses that only where it sees the overlap: of a single row, or where both are dense.
    """
    first, *others = [batch._meta for batch in call.batches]
    if not others or first.spec.determines_strides or call.view.of_parameters or not call.may_write():
        return False
    alike = call.func is not _SETITEM and all(other is first for other in others)
    return not (alike and is_dense(first.shape, first.strides))


def overlapping_operands(call: DescribedCall) -> list[BatchTensor]:
    """Return the operands that are of the memory of the first batch, though not the same entries of it."""
    first = call.batches[0]
    rows, may_be_same = first._shares[0]._rows, call.func is not _SETITEM

    def overlaps(other: BatchTensor) -> bool:
        its = other._shares[0]._rows
        same = other._meta is first._meta and its.storage_offset() == rows.storage_offset()
        return same_memory(its, rows) and not (may_be_same and same)

    return [other for other in call.batches[1:] if overlaps(other)]


@contextmanager
def apart(overlapping: list[BatchTensor], call: DescribedCall) -> Iterator[DescribedCall]:
    """Return a context with the call whose overlapping operands torch takes for other memory."""
    first = call.batches[0]._meta
    aliases: dict[int, Tensor] = {}

    def alias_of(batch: BatchTensor) -> BatchTensor:
        seen = all(is_dense(meta.shape, meta.strides) for meta in (first, batch._meta))  # on one device, too
        if seen or not any(batch is other for other in overlapping):
            return batch
        rows = batch._local
        alias = from_dlpack(rows.detach().resolve_conj().resolve_neg())
        aliases[id(batch)] = alias = StraightThrough.apply(rows, alias) if rows.requires_grad else alias
        return BatchTensor(alias, batch._spec, batch._meta.strides)

    args, kwargs = tree_map_only(BatchTensor, alias_of, (call.args[1:], call.kwargs))
    yield DescribedCall(call.func, (call.args[0], *args), kwargs)
    for alias in aliases.values():  # what autograd has saved of it is out of date
        set_version(alias, version(alias) + 1)


def compute_in(memory: BatchTensor, call: DescribedCall) -> Any:
    """Compute a call whole, with parts of one copy of `memory`, of which its batches are views."""

    @wraps(call.func)
    def compute(*args: Any, memory: Tensor, **kwargs: Any) -> Any:
        return call.func(*args, **kwargs)

    return compute_whole(compute, call.args, {**call.kwargs, "memory": memory})
