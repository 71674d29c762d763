"""Gathered copies of which memory was handed out: `row = x[0]`, `x.numpy()`.

On one device they are the batch's own memory: what is written into one is seen in the other. Here each side is
written into the other when a batch is next looked at, or has been written into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.private.torch import count_references, is_mapped_over, is_transformed, memory_of, tree_leaves, version_of
from duoka.view.below import unseen
from duoka.view.site import user_line

if TYPE_CHECKING:
    from duoka.view.batch import Spec


@dataclass(slots=True)
class _Copy:
    """A gathered copy of `rows`."""

    rows: Tensor
    spec: Spec
    whole: Tensor
    holders: int  # of its memory, when nobody but duoka had it
    written_back: Callable[[], None]  # called when the rows are again what the copy is
    versions: tuple[int, int] = (0, 0)
    grad_fn: Any = None

    def __post_init__(self) -> None:
        self.in_step()

    def in_step(self) -> None:
        """Both sides are the same now."""
        self.versions, self.grad_fn = (version(self.rows), version(self.whole)), self.whole.grad_fn

    def is_held(self) -> bool:
        """Whether somebody still has the copy's memory."""
        return holders(self.whole) > self.holders

    def is_of(self, rows: Tensor, spec: Spec) -> bool:
        """Whether it is a copy of just these rows, for whoever does not ask for gradients."""
        alike = self.spec == spec and self.rows.shape == rows.shape and self.rows.stride() == rows.stride()
        return alike and self.rows.data_ptr() == rows.data_ptr() and self.rows.dtype == rows.dtype

    def write_through(self, looked_at: Tensor) -> None:
        """Write what was written into the copy into the rows, if who looks at `looked_at` could see it."""
        if version(self.whole) != self.versions[1]:
            self._refuse_gradients()
            with torch.no_grad():
                self.rows.copy_(self._own())
            self.in_step()
            self.written_back()
        elif self._is_written_unseen(looked_at):
            self.rows.data.copy_(self._own())  # nor is it seen here, as on one device

    def _is_written_unseen(self, looked_at: Tensor) -> bool:
        """Whether numpy or its like, of which torch sees nothing, wrote into the copy."""
        if not self.whole.is_cpu or version(self.rows) != self.versions[0]:
            return False
        if self.is_held() and not same_memory(self.rows, looked_at):
            return False
        return not _equal(self._own(), self.rows)

    def _refuse_gradients(self) -> None:
        if self.whole.grad_fn is not self.grad_fn:
            raise Refused(
                f"rows taken from a batch were written into before {user_line()}, with a gradient; write through the "
                "batch itself instead: `x[i] = value`, not `x[i].add_(value)`"
            )

    def _own(self) -> Tensor:
        return self.spec.own(self.whole.detach())


class Lent:
    """The gathered copies that matter, of all batches of a view. copies: empty, nearly always.

    unseen: the script has taken `x.data` of a batch, through which it may write without a trace.
    """

    def __init__(self) -> None:
        self.copies: list[_Copy] = []
        self.unseen = False

    def lend(
        self, rows: Tensor, spec: Spec, whole: Tensor, holders: int, out: Any, written_back: Callable[[], None]
    ) -> None:
        """Remember `whole`, the copy of `rows`, where its memory is among what goes out.

        written_back: called whenever what was written into the copy has been written into the rows.
        """
        if any(copy.whole is whole for copy in self.copies):
            return
        if any(_has_memory_of(whole, leaf) for leaf in ([out] if isinstance(out, Tensor) else tree_leaves(out))):
            with unseen():
                self.copies.append(_Copy(rows.detach(), spec, whole, holders, written_back))

    def of(self, rows: Tensor, spec: Spec) -> Tensor | None:
        """The copy of these rows that is there already: what is taken twice is the same memory."""
        if rows.requires_grad:
            return None
        found = (copy.whole for copy in self.copies if copy.is_of(rows, spec) and not copy.whole.requires_grad)
        return next(found, None)

    def settle(self, rows: Tensor) -> None:
        """Before these rows are looked at: what was written into copies is written into the rows."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.write_through(rows)
        self.copies = [copy for copy in copies if copy.is_held() and holders(copy.rows) > 1]

    @contextmanager
    def in_step(self, rows: Tensor, put_back: Any) -> Iterator[None]:
        """Around an operation that may write into `rows`: copies that somebody has are gathered anew, by all ranks.

        put_back: what is just being written (`x[1:3] += 1` takes rows out, adds, and puts the same back).
        """
        if isinstance(put_back, Tensor):
            self.copies = [copy for copy in self.copies if not same_memory(put_back, copy.whole)]
        self.settle(rows)
        before = version(rows)
        yield
        written = version(rows) != before
        for copy in self.copies:
            through_data = written and same_memory(copy.rows, rows)  # `x.data` has a version of its own
            if copy.is_held() and (through_data or version(copy.rows) != copy.versions[0]):
                copy.spec.view.own.meet(_gather_anew, copy)


def _gather_anew(copies: list[_Copy]) -> list[None]:
    """Write what the own shares' rows are now into their copy."""
    with torch.no_grad():
        whole = copies[0].spec.together([(copy.spec, copy.rows) for copy in copies])
        copies[0].whole.copy_(whole)
    for copy in copies:
        copy.in_step()
    return [None] * len(copies)


def version(tensor: Tensor) -> int:
    """How often a tensor's memory was written into; 0 for a tensor of the inference mode, which does not count."""
    return 0 if tensor.is_inference() else version_of(tensor)


def holders(tensor: Tensor) -> int:
    """How many tensors and arrays have this tensor's memory."""
    return count_references(tensor)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are views of the same memory."""
    if one.layout is not torch.strided or one.device != other.device:
        return False
    return memory_of(one) == memory_of(other)


def _has_memory_of(whole: Tensor, leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return not (is_transformed(leaf) or is_mapped_over(leaf)) and same_memory(leaf, whole)
    if isinstance(leaf, np.ndarray):
        return bool(np.may_share_memory(leaf, whole.detach().numpy()))
    return isinstance(leaf, (torch.UntypedStorage, torch.TypedStorage)) or type(leaf).__name__ == "PyCapsule"


def _equal(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    same: Tensor = one == other
    every: Any = torch.all(same | (one != one) & (other != other)).item()  # not a number is the same, too
    return bool(every)
