"""The batch tensor: stands for a whole global batch while this rank holds its own rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from duoka.errors import DuokaError, Refused
from duoka.view.collectives import Gathered
from duoka.view.cut import Cut
from duoka.view.lent import holders
from duoka.view.site import user_line
from duoka.view.view import View

_NUMBER = re.compile(r"\d+")

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Spec:
    """Where the batch sits: dimension `dim` has `outer * n * inner` entries, the samples in the middle.

    `[B, T, C].view(-1, C)` has inner = T, `[T, B, C].view(-1, C)` has outer = T.
    """

    view: View
    cut: Cut
    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """Entries of the batch dimension, of all ranks together."""
        return self.outer * self.cut.n * self.inner

    @property
    def local_size(self) -> int:
        """Entries of the batch dimension that this rank holds."""
        return self.outer * self.cut.rows * self.inner

    def at(self, dim: int) -> Spec:
        """The same rows in another dimension."""
        return self if dim == self.dim else replace(self, dim=dim)

    def own(self, whole: Tensor, dim: int | None = None) -> Tensor:
        """This rank's rows of a replicated tensor, along `dim` (default: `self.dim`), as a view."""
        dim = self.dim if dim is None else dim
        whole = self.view.enter(whole)
        if self.outer == 1:
            return whole.narrow(dim, self.cut.start * self.inner, self.cut.rows * self.inner)
        apart = whole.unflatten(dim, (self.outer, self.cut.n, self.inner))
        own: Tensor = apart.narrow(dim + 1, self.cut.start, self.cut.rows).flatten(dim, dim + 2)
        return own

    def gather(self, local: Tensor) -> Tensor:
        """Every rank's rows put together: the replicated tensor that one device would have."""
        apart = local.unflatten(self.dim, (self.outer, self.cut.rows, self.inner)).movedim(self.dim + 1, 0)
        whole: Tensor = Gathered.apply(apart, self.cut, self.view.ranks)
        whole = whole.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)
        return whole.contiguous() if local.is_contiguous() else whole


class BatchTensor(Tensor):
    """Has the global shape and no storage; `to_local()` is this rank's rows, `full_tensor()` all rows.

    Every torch function looks itself up in `rules`; what has no rule is gathered and computed whole.
    """

    _rows: Tensor
    _spec: Spec
    rules: ClassVar[Mapping[Callable[..., Any], Rule]] = {}

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec) -> BatchTensor:
        """`local`: this rank's rows, tracked by autograd; the size of its batch dimension must be the share."""
        shape = list(local.shape)
        if shape[spec.dim] != spec.local_size:
            raise AssertionError(
                f"a tensor of shape {tuple(shape)} does not hold {spec.local_size} rows in dimension {spec.dim}"
            )
        shape[spec.dim] = spec.size
        batch: BatchTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        batch._rows, batch._spec = local, spec
        return batch

    @property
    def _local(self) -> Tensor:
        lent = self._spec.view.lent
        if lent.copies:
            lent.settle(self._rows)
        return self._rows

    def to_local(self) -> Tensor:
        """This rank's rows, as a plain tensor that shares memory and gradient with the batch."""
        return self._local

    def full_tensor(self) -> Tensor:
        """All rows, gathered: a collective, called by every rank."""
        return self._spec.gather(self._local)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not args and "input" in kwargs and func not in _INPUT_IS_NOT_FIRST:
            args, kwargs = (kwargs["input"],), {name: kwargs[name] for name in kwargs if name != "input"}
        first = args[0] if args else None
        try:
            if isinstance(first, BatchTensor) and first._spec.view.lent.copies:
                with first._spec.view.lent.in_step(first._rows, args[2] if func is Tensor.__setitem__ else None):
                    return cls._compute(func, args, kwargs)
            return cls._compute(func, args, kwargs)
        except Refused as error:
            batches_in((args, kwargs))[0]._spec.view.refused(error)
            raise

    @classmethod
    def _compute(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = cls.rules.get(func)
        if rule is not None and kwargs.get("out") is None:
            try:
                out = rule(func, args, kwargs)
            except Exception as error:
                view = batches_in((args, kwargs))[0]._spec.view
                again = tree_map_only(BatchTensor, alike, (args, kwargs))
                raise of_the_whole(error, view, lambda: func(*again[0], **again[1])) from None
            if out is not NotImplemented:
                return out
        return compute_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.alias.default:  # `torch.Tensor(x)`, which asks nobody
            return compute_whole(Tensor.detach, args, {}).clone()
        error = Refused(f"{func} came to a batch past duoka's rules ({user_line()}), so it cannot be shared out")
        batches_in((args, kwargs))[0]._spec.view.refused(error)
        raise error


def alike(batch: BatchTensor) -> Tensor:
    """A whole tensor of the batch's shape, of this rank's rows over and over: nobody else is asked."""
    spec = batch._spec
    apart = batch._rows.detach().unflatten(spec.dim, (spec.outer, spec.cut.rows, spec.inner))
    places = torch.arange(spec.cut.n, device=batch.device) % spec.cut.rows
    whole: Tensor = apart.index_select(spec.dim + 1, places).flatten(spec.dim, spec.dim + 2)
    return whole


def of_the_whole(error: Exception, view: View, again: Callable[[], object]) -> Exception:
    """What one device would raise in place of an error that names the shapes of some rows.

    again: does the same with a whole batch of other rows. If that raises nothing of the kind, it was these rows.
    """
    if not isinstance(error, (RuntimeError, ValueError)) or isinstance(error, (DuokaError, torch.OutOfMemoryError)):
        return error
    before, view.ranks.alone = view.ranks.alone, True
    try:
        again()
    except Exception as whole:
        alike_but_for_numbers = _NUMBER.sub("#", repr(whole)) == _NUMBER.sub("#", repr(error))
        return whole.with_traceback(error.__traceback__) if alike_but_for_numbers else error
    finally:
        view.ranks.alone = before
    return error


def gather_all(tree: Any) -> Any:
    """`tree` with every batch tensor in it gathered."""
    return tree_map_only(BatchTensor, BatchTensor.full_tensor, tree)


def batches_in(tree: Any) -> list[BatchTensor]:
    """The batch tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, BatchTensor)]


def compute_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather, and compute as one device would: always right, at worst not faster.

    What the operation writes into a batch is written back into each rank's own rows.
    """
    name = _name_of(func)
    if name in REFUSED:
        raise Refused(f"{name} of a batch cannot be shared out ({user_line()}){REFUSED[name]}")
    batches = batches_in((args, kwargs))
    with batches[0]._spec.view.gathered.timed(name):
        copies = {id(batch): _Copy(batch) for batch in batches}
        args, kwargs = tree_map_only(BatchTensor, lambda batch: copies[id(batch)].whole, (args, kwargs))
        out = func(*args, **kwargs)
        for copy in copies.values():
            out = copy.handed_out(out) if copy.whole_is_untouched() else copy.written_back(name, out)
        return out


class _Copy:
    """A gathered copy of a batch, for one operation."""

    def __init__(self, batch: BatchTensor) -> None:
        rows, spec = batch._local, batch._spec
        known = spec.view.lent.of(rows, spec)
        if known is None:
            with torch.inference_mode(False), torch.set_grad_enabled(_records_gradients()):  # it must have a version
                known = spec.gather(rows)
        self.batch, self.whole = batch, known
        self._version, self._holders = known._version, holders(known)

    def whole_is_untouched(self) -> bool:
        return self.whole._version == self._version

    def handed_out(self, out: Any) -> Any:
        """The result, where nothing was written: the batch itself, views of the copy, or what has its own memory."""
        if out is self.whole:
            return self.batch
        self.batch._spec.view.lent.lend(self.batch._rows, self.batch._spec, self.whole, self._holders, out)
        return out

    def written_back(self, name: str, out: Any) -> Any:
        """The result, where the operation wrote into the copy."""
        if self.whole.shape != self.batch.shape or self.whole.dtype != self.batch.dtype:
            raise Refused(
                f"{name} at {user_line()} would change a batch's shape or type in place; assign the result instead"
            )
        self.batch._local.copy_(self.batch._spec.own(self.whole))
        return tree_map_only(Tensor, lambda leaf: self.batch if leaf is self.whole else leaf, out)


def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    return name if name != "__get__" else func.__self__.__name__  # type: ignore[attr-defined]


def _records_gradients() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


# Operations that would be done to a copy and be lost, and what to do instead.
REFUSED = {
    "__set__": "; set it before the batch is made",
    "__delete__": "",
    "set_": "; write `x = y`",
    "share_memory_": "",
    "is_set_to": "",
    "register_post_accumulate_grad_hook": "; do what it does after backward() instead",
}

_INPUT_IS_NOT_FIRST = (torch.where, torch.searchsorted)
