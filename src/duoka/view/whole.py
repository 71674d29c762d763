"""What has no rule is computed whole: batches are gathered, and every rank computes what one device would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.private.torch import tree_map_only
from duoka.view.batch import BatchTensor, Spec, batches_in, joined, of_share
from duoka.view.lent import holders, version
from duoka.view.site import user_line


def compute_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "") -> Any:
    """Gather, and compute as one device would: always right, at worst not faster.

    What the operation writes into a batch is written back into each rank's own rows. name: of the operation, to be
    shown; default: what torch calls it.
    """
    name = name or _name_of(func)
    first = batches_in((args, kwargs))[0]
    own = first._spec.view.own
    if len(first._shares) == own.count:
        return _compute_whole(name, func, args, kwargs)

    def together(calls: list[Any]) -> list[Any]:  # one of several shares is here: the others compute the same
        args, kwargs = joined(calls)
        out = _compute_whole(name, func, args, kwargs)
        return [of_share(out, place) for place in range(own.count)]

    return own.meet(together, (args, kwargs))


def _compute_whole(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in REFUSED:
        raise Refused(f"{name} of a batch cannot be shared out ({user_line()}){REFUSED[name]}")
    batches = batches_in((args, kwargs))
    with batches[0]._spec.view.gathered.timed(name):
        copies = {id(batch): _Copy(batch, keep=name in _TAKING_ROWS) for batch in batches}
        args, kwargs = tree_map_only(BatchTensor, lambda batch: copies[id(batch)].whole, (args, kwargs))
        out = func(*args, **kwargs)
        for copy in copies.values():
            out = copy.handed_out(out) if copy.whole_is_untouched() else copy.written_back(name, out)
        return out


def take_row(batch: BatchTensor, index: int) -> Any:
    """`batch[index]`, as `compute_whole` gives it, without looking for batches: loops over rows call it often."""
    with batch._spec.view.gathered.timed("__getitem__"):
        copy = _Copy(batch, keep=True)
        return copy.handed_out(copy.whole[index])


@dataclass(frozen=True, slots=True)
class _Kept:
    """All rows of a batch, gathered for who takes them out one by one (a loss in a loop over samples)."""

    whole: Tensor
    state: tuple[int, ...]

    @staticmethod
    def state_of(rows: Tensor, whole: Tensor) -> tuple[int, ...]:
        """What is not the same any more where one was written into, or given other memory."""
        return id(rows), rows.data_ptr(), version(rows), version(whole)

    def of(self, rows: Tensor) -> Tensor | None:
        """They, where nothing was written since, and gradients are recorded as they were."""
        if self.state != self.state_of(rows, self.whole):
            return None
        records = rows.requires_grad and _records_gradients()
        return self.whole if self.whole.requires_grad == records else None


class _Copy:
    """A gathered copy of a batch, for one operation. keep: more of it may be asked for."""

    def __init__(self, batch: BatchTensor, keep: bool) -> None:
        parts = [(share._spec, share._local) for share in batch._shares]
        spec, rows = parts[0]
        known = spec.view.lent.of(rows, spec)
        keep = keep and not spec.view.lent.unseen
        if known is None and keep and batch._kept is not None:
            known = batch._kept.of(rows)
        if known is None:
            records = _records_gradients()  # the next line's first part sets it
            with torch.inference_mode(False), torch.set_grad_enabled(records):  # it must have a version
                known = Spec.together(parts)
            if keep:
                _keep(ref(batch), known)
        self.batch, self.whole, self._keeps = batch, known, keep
        self._version, self._holders = version(known), holders(known)

    def whole_is_untouched(self) -> bool:
        return version(self.whole) == self._version

    def handed_out(self, out: Any) -> Any:
        """The result, where nothing was written: the batch itself, views of the copy, or what has its own memory."""
        if out is self.whole:
            return self.batch
        for share in self.batch._shares:
            keep = partial(_keep, ref(self.batch), self.whole) if self._keeps else _forget
            share._spec.view.lent.lend(share._rows, share._spec, self.whole, self._holders, out, keep)
        return out

    def written_back(self, name: str, out: Any) -> Any:
        """The result, where the operation wrote into the copy."""
        if self.whole.shape != self.batch.shape or self.whole.dtype != self.batch.dtype:
            raise Refused(
                f"{name} at {user_line()} would change a batch's shape or type in place; assign the result instead"
            )
        shares = self.batch._shares
        view = self.batch._spec.view
        view.written += 1
        view.own.each(lambda place: shares[place]._local.copy_(shares[place]._spec.own(self.whole)))
        return tree_map_only(Tensor, lambda leaf: self.batch if leaf is self.whole else leaf, out)


def _keep(batch: ReferenceType[BatchTensor], whole: Tensor) -> None:
    """Keep the copy for whoever takes more rows of the batch: a loop that writes row by row gathers once."""
    found = batch()
    if found is not None:
        found._kept = _Kept(whole, _Kept.state_of(found._shares[0]._rows, whole))


def _forget() -> None:
    """Keep nothing."""


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    return name if name != "__get__" else func.__self__.__name__  # type: ignore[attr-defined]


def _records_gradients() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


_TAKING_ROWS = ("__getitem__", "select", "narrow", "unbind", "split", "chunk")  # of a batch that lives on

# Operations that would be done to a copy and be lost, and what to do instead.
REFUSED = {
    "__set__": "; set it before the batch is made",
    "__delete__": "",
    "set_": "; write `x = y`",
    "share_memory_": "",
    "is_set_to": "",
    "register_post_accumulate_grad_hook": "; do what it does after backward() instead",
}
