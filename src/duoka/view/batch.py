"""The batch tensor: stands for a whole global batch while this rank holds its own rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from duoka.errors import DuokaError, Refused
from duoka.private.torch import make_wrapper, tree_leaves, tree_map_only, version_of
from duoka.view.crossings import Gathered
from duoka.view.cut import Cut
from duoka.view.lent import holders, version
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
        if self.outer == 1 == self.inner:
            rows: Tensor = self.cut.own(whole, dim)
            return rows
        apart = whole.unflatten(dim, (self.outer, self.cut.n, self.inner))
        own: Tensor = self.cut.own(apart, dim + 1).flatten(dim, dim + 2)
        return own

    def gather(self, local: Tensor) -> Tensor:
        """Every rank's rows put together: the replicated tensor that one device would have."""
        whole: Tensor = self.view.own.meet(lambda parts: [Spec.together(parts)] * len(parts), (self, local))
        return whole

    @staticmethod
    def together(parts: list[tuple[Spec, Tensor]]) -> Tensor:
        """The replicated tensor of which `parts` are the own shares' rows."""
        spec, local = parts[0]
        apart = [
            rows.unflatten(spec.dim, (spec.outer, of.cut.rows, spec.inner)).movedim(spec.dim + 1, 0)
            for of, rows in parts
        ]
        whole: Tensor = Gathered.apply(spec.view.own, tuple(of.cut for of, _ in parts), *apart)
        whole = spec.cut.in_order(whole).movedim(0, spec.dim + 1).flatten(spec.dim, spec.dim + 2)
        return whole.contiguous() if local.is_contiguous() else whole


class BatchTensor(Tensor):
    """Has the global shape and no storage; `to_local()` is this rank's rows, `full_tensor()` all rows.

    Every torch function looks itself up in `rules`; what has no rule is gathered and computed whole.
    """

    _rows: Tensor
    _spec: Spec
    _kept: _Kept | None = None
    rules: ClassVar[Mapping[Callable[..., Any], Rule]] = {}
    together: ClassVar[frozenset[Rule]] = frozenset()  # rules that take all own shares at once
    drawing: ClassVar[frozenset[Rule]] = frozenset()  # rules that draw random numbers

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec) -> BatchTensor:
        """`local`: this rank's rows, tracked by autograd; the size of its batch dimension must be the share."""
        shape = list(local.shape)
        if shape[spec.dim] != spec.local_size:
            raise AssertionError(
                f"a tensor of shape {tuple(shape)} does not hold {spec.local_size} rows in dimension {spec.dim}"
            )
        shape[spec.dim] = spec.size
        batch: BatchTensor = make_wrapper(cls, shape, dtype=local.dtype, device=local.device)
        batch._rows, batch._spec = local, spec
        return batch

    @property
    def _shares(self) -> tuple[BatchTensor, ...]:
        """The own shares: this one."""
        return (self,)

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
    def of(cls, whole: Tensor, view: View, dim: int = 0) -> BatchTensor:
        """A tensor that every rank holds whole, as a batch with its samples in `dim`."""

        def share(place: int) -> BatchTensor:
            own = view.own.views[place]
            spec = Spec(own, own.cut(whole.shape[dim]), dim)
            return BatchTensor(spec.own(whole), spec)

        return join(view.own.each(share))

    @classmethod
    def of_rows(cls, rows: Tensor, n: int, view: View) -> BatchTensor:
        """The rows that this process has of a batch of n, in dimension 0."""
        specs = [Spec(own, own.cut(n)) for own in view.own.views]
        if len(specs) == 1:
            return BatchTensor(rows, specs[0])
        parts = rows.split([spec.cut.rows for spec in specs])
        # Memory of its own: what is computed from it must not depend on where it lies among other shares.
        return join([BatchTensor(part.clone(), spec) for part, spec in zip(parts, specs, strict=True)])

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
        except Exception as error:
            batches_in((args, kwargs))[0]._spec.view.raised(error)
            raise

    @classmethod
    def _compute(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = cls.rules.get(func)
        if rule is not None and kwargs.get("out") is None:
            try:
                out = rule(func, args, kwargs)
            except Exception as error:
                if has_sparse((args, kwargs)):  # rules cut what is dense
                    return compute_whole(func, args, kwargs)
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
        batches_in((args, kwargs))[0]._spec.view.raised(error)
        raise error


class Joint(BatchTensor):
    """A batch of which this process holds several shares, each a batch tensor as a rank of its own would have it.

    An operation is computed for each. What is the same for all comes from the first, `_spec` too.
    """

    _own: tuple[BatchTensor, ...]

    @staticmethod
    def __new__(cls, shares: Sequence[BatchTensor]) -> Joint:
        """`shares`: the own ones, in their order."""
        spec, rows = shares[0]._spec, shares[0]._rows
        shape = list(rows.shape)
        shape[spec.dim] = spec.size
        batch: Joint = make_wrapper(cls, shape, dtype=rows.dtype, device=rows.device)
        batch._own, batch._spec = tuple(shares), spec
        return batch

    @property
    def _shares(self) -> tuple[BatchTensor, ...]:
        return self._own

    @property
    def _rows(self) -> Tensor:  # type: ignore[override]
        raise AssertionError("several shares have no rows in common")

    @property
    def _local(self) -> Tensor:
        raise AssertionError("several shares have no rows in common")

    def to_local(self) -> Tensor:
        """This process's rows, as a plain tensor with the batch's gradient (and memory of its own)."""
        dim, outer, inner = self._spec.dim, self._spec.outer, self._spec.inner
        apart = [own._local.unflatten(dim, (outer, own._spec.cut.rows, inner)) for own in self._own]
        rows: Tensor = torch.cat(apart, dim + 1).flatten(dim, dim + 2)
        return rows

    def full_tensor(self) -> Tensor:
        return Spec.together([(own._spec, own._local) for own in self._own])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        rule = cls.rules.get(func)
        if rule in cls.together:
            return rule(func, args, kwargs)
        found: list[Joint] = []
        shares = [_of_share((args, kwargs), 0, found)]
        shares += [of_share((args, kwargs), place) for place in range(1, len(found[0]._own))]

        def compute(place: int) -> Any:
            args, kwargs = shares[place]
            return BatchTensor.__torch_function__(func, types, args, kwargs)

        return joined(found[0]._spec.view.own.each(compute, draws=rule in cls.drawing), found)


def _of_share(value: Any, place: int, found: list[Joint]) -> Any:
    """What holds batches in nested containers, with the own share at `place` of each; `found` are the batches."""
    if isinstance(value, Joint):
        found.append(value)
        return value._own[place]
    if isinstance(value, dict):
        return {key: _of_share(one, place, found) for key, one in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return _like(value, [_of_share(one, place, found) for one in value])
    return value


def of_share(value: Any, place: int) -> Any:
    """What holds batches in nested containers, with the own share at `place` in place of each."""
    return _of_share(value, place, [])


def join(shares: Sequence[BatchTensor]) -> BatchTensor:
    """The batch of which these are the own shares."""
    return shares[0] if len(shares) == 1 else Joint(shares)


def joined(outs: Sequence[Any], given: Sequence[Joint] = ()) -> Any:
    """What the own shares have come to, as one: batches are joined, the rest is the first's.

    given: batches that they may be: a share that is one of theirs is that batch itself.
    """
    first = outs[0]
    if len(outs) == 1:
        return first
    if isinstance(first, BatchTensor):
        same = [batch for batch in given if batch._own[0] is first]
        return same[0] if same else Joint(outs)
    if isinstance(first, dict):
        return {key: joined([out[key] for out in outs], given) for key in first}
    if isinstance(first, (tuple, list)) and not isinstance(first, torch.Size):
        return _like(first, [joined(parts, given) for parts in zip(*outs, strict=True)])
    return first


def _like(value: Any, parts: list[Any]) -> Any:
    """The same (named) tuple or list with other parts."""
    kind = type(value)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def alike(batch: BatchTensor) -> Tensor:
    """A whole tensor of the batch's shape, of this rank's rows over and over: nobody else is asked."""
    batch = batch._shares[0]
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


def has_sparse(tree: Any) -> bool:
    """Whether a sparse tensor is in nested containers."""
    return any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in tree_leaves(tree))


def compute_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather, and compute as one device would: always right, at worst not faster.

    What the operation writes into a batch is written back into each rank's own rows.
    """
    first = batches_in((args, kwargs))[0]
    own = first._spec.view.own
    if len(first._shares) == own.count:
        return _compute_whole(func, args, kwargs)

    def together(calls: list[Any]) -> list[Any]:  # one of several shares is here: the others compute the same
        args, kwargs = joined(calls)
        out = _compute_whole(func, args, kwargs)
        return [of_share(out, place) for place in range(own.count)]

    return own.meet(together, (args, kwargs))


def _compute_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = _name_of(func)
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
            with torch.inference_mode(False), torch.set_grad_enabled(_records_gradients()):  # it must have a version
                known = Spec.together(parts)
            if keep:
                batch._kept = _Kept(known, _Kept.state_of(rows, known))
        self.batch, self.whole = batch, known
        self._version, self._holders = version_of(known), holders(known)

    def whole_is_untouched(self) -> bool:
        return version_of(self.whole) == self._version

    def handed_out(self, out: Any) -> Any:
        """The result, where nothing was written: the batch itself, views of the copy, or what has its own memory."""
        if out is self.whole:
            return self.batch
        for share in self.batch._shares:
            share._spec.view.lent.lend(share._rows, share._spec, self.whole, self._holders, out)
        return out

    def written_back(self, name: str, out: Any) -> Any:
        """The result, where the operation wrote into the copy."""
        if self.whole.shape != self.batch.shape or self.whole.dtype != self.batch.dtype:
            raise Refused(
                f"{name} at {user_line()} would change a batch's shape or type in place; assign the result instead"
            )
        shares = self.batch._shares
        view = self.batch._spec.view
        view.own.each(lambda place: shares[place]._local.copy_(shares[place]._spec.own(self.whole)))
        return tree_map_only(Tensor, lambda leaf: self.batch if leaf is self.whole else leaf, out)


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

_INPUT_IS_NOT_FIRST = (torch.where, torch.searchsorted)
