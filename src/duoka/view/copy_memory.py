"""The memory of a gathered copy: the tensors of it that duoka refers to, and what autograd has recorded of writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from duoka.errors import Refused
from duoka.private.torch import base_of, count_hooks, is_view, memory_of
from duoka.system.user_code import user_line
from duoka.view.memory import as_in_memory, form_of, history, holders, is_of_leaf, physical, same_form
from duoka.view.shares.strides import contiguous_strides, overwrite
from duoka.view.transforms import without_modes

if TYPE_CHECKING:
    from duoka.view.tensor.spec import Spec


Parts = list[tuple["Spec", Tensor]]  # the rows of each local share, and where they are in the batch


def refuse_lost_hook(rows: Tensor) -> None:
    """Raise Refused for rows with a hook that torch would no longer call after a recorded write to their base.

    It gives the view another history then, without the hook. Here that of the write contains the history before.
    """
    if is_view(rows) and count_hooks(rows):
        raise Refused(
            f"{user_line()} writes to rows of a batch that is a view (`x.transpose(0, 1)`) and has a hook, which "
            "torch would no longer call; register the hook after the write, or on a `clone()` of the view"
        )


class _Original:
    """The rows of a local share of which a tensor is the copy: a view of `base`."""

    def __init__(self, spec: Spec, rows: Tensor) -> None:
        base = base_of(rows)
        self.spec, self.base, self._form = spec, TensorWeakRef(base), form_of(rows)
        self.rows = TensorWeakRef(rows)
        self.key = memory_of(rows), id(base)  # also once the base is gone

    def record(self, copy: Tensor) -> None:
        """Replace the values of the rows by those of their copy, with its history."""
        base = self.base()
        rows = self.rows()
        if rows is not None:
            refuse_lost_hook(rows)
        if any(of is not None and of.retains_grad for of in (rows, base)):
            raise Refused(
                f"rows taken from a batch that retains its gradient were written into before {user_line()}, with a "
                "gradient; write through the batch itself instead: `x[i] = value`, not `x[i].add_(value)`"
            )
        if base is not None:  # else nothing can read them
            offset, shape, strides = self._form
            with torch.inference_mode(False), torch.enable_grad(), without_modes():
                overwrite(base.as_strided(shape, strides, offset), self.spec.local_rows(physical(copy)))


@dataclass(slots=True, eq=False)
class _Known:
    """A tensor of a copy's memory that duoka refers to."""

    tensor: Tensor
    originals: list[_Original]  # of each local share
    history: Any  # when it was last equal to them

    @property
    def base_key(self) -> tuple[int, int] | None:
        """Equal for copies of the same base of rows; None if it is a copy of none."""
        return self.originals[0].key if self.originals else None

    def is_of(self, base: Tensor) -> bool:
        """Return True if it is a copy of rows of this base, of the first local share."""
        return len(self.originals) > 0 and self.originals[0].base() is base

    def is_copy_of(self, rows: Tensor) -> bool:
        """Return True if it is the copy of this very tensor of rows, of the first local share."""
        return len(self.originals) > 0 and self.originals[0].rows() is rows

    def is_recorded(self) -> bool:
        """Return True if autograd has recorded a write to its memory since it was equal to the rows."""
        return history(self.tensor) is not self.history


class CopyMemory:
    """The memory of a gathered copy, as all local shares know it.

    argument: the copy of the rows in `parts`, which the script's function got. holders: references to its memory
    before the script got one.
    """

    full: Tensor  # all that has been gathered, without autograd, and as it is in memory

    def __init__(self, argument: Tensor, parts: Parts, holders: int) -> None:
        self.full, self.memory = as_in_memory(argument), memory_of(argument)
        originals = [_Original(*part) for part in parts]
        self._known = [_Known(argument, originals, history(argument)), _Known(self.full, [], None)]
        self._others = holders - 1  # references to it that are not the script's: the base of a view

    def mark_equal(self) -> None:
        """Note that the rows have all writes to this memory."""
        for known in self._known:
            known.history = history(known.tensor)

    def is_recorded(self) -> bool:
        """Return True if autograd has recorded a write to this memory since it was equal to the rows."""
        return any(known.is_recorded() for known in self._known)

    def is_held(self) -> bool:
        """Return True if the script still holds a reference to this memory."""
        return holders(self.full) > self._others + len(self._known)

    def keep(self, tensor: Tensor, parts: Parts, records: bool = False) -> Tensor:
        """Return a copy of the rows in `parts`, of which a reference does not mean that the script holds the memory.

        It is the one of the same form that is known, if neither has gradients. records: one with gradients will do,
        if it is of these rows themselves: the gradient of another view of their base passes by them.
        """
        rows = parts[0][1]
        base = base_of(rows)
        for known in self._known:
            has_gradients = known.tensor.requires_grad
            fits = (known.is_copy_of(rows) and records) if has_gradients else not tensor.requires_grad
            if known.tensor is tensor or (fits and known.is_of(base) and same_form(known.tensor, tensor)):
                return known.tensor
        self._known.append(_Known(tensor, [_Original(*part) for part in parts], history(tensor)))
        return tensor

    def recorded(self) -> list[_Known]:
        """Return the tensors to which autograd has recorded a write since they were equal to the rows.

        Raises:
            Refused: another tensor of the same rows would need that history, too.
        """
        self._forget_unused()
        written = [known for known in self._known if known.is_recorded()]
        for known in written:
            base = known.originals[0].base() if known.originals else None
            several = sum(other.base_key == known.base_key for other in self._known) > 1
            if several or known.base_key is None or not (base is None or _can_be_recorded(base, known.tensor)):
                raise Refused(
                    f"rows taken from a batch were written into before {user_line()}, with a gradient; write through "
                    "the batch itself instead: `x[i] = value`, not `x[i].add_(value)`"
                )
        return written

    def record_write(self, base: Tensor, full: Tensor) -> None:
        """Record that `full`, with a graph, has replaced the values of all tensors that were taken of a base."""
        self._forget_unused()
        memory = torch.empty_strided(full.shape, self.full.stride(), dtype=full.dtype, device=full.device)
        overwrite(memory, full)
        for known in self._known:
            if known.is_of(base) and known.tensor.dtype == full.dtype:
                target = physical(known.tensor)
                offset = int(target.storage_offset()) - int(self.full.storage_offset())
                overwrite(target, memory.as_strided(target.shape, target.stride(), offset))

    def _forget_unused(self) -> None:
        """Forget the tensors that nothing else refers to, of which a loop over rows makes many."""
        # The base of a view is among `_others`.
        unrecorded = [known for known in self._known if not known.is_recorded()]
        loose = [known for known in unrecorded if base_of(known.tensor) is known.tensor is not self.full]
        references = [TensorWeakRef(known.tensor) for known in loose]
        for known in loose:
            del known.tensor
        for known, reference in zip(loose, references, strict=True):
            tensor = reference()
            if tensor is None:
                self._known.remove(known)
            else:
                known.tensor = tensor

    def extend(self, shape: Sequence[int], offset: int) -> Tensor:
        """Make `full` a contiguous tensor of this shape, whose first element is at `offset` in this memory."""
        self.full = self.full.as_strided(shape, contiguous_strides(shape), offset).detach()
        self._known.append(_Known(self.full, [], None))
        return self.full


def _can_be_recorded(base: Tensor, copy: Tensor) -> bool:
    """Return True if autograd can record a write of a copy to the base of its rows."""
    return not (is_of_leaf(base) or base.dtype != copy.dtype or base.is_conj() or base.is_neg())
