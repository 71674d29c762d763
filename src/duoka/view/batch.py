"""The batch tensor: stands for a whole global batch while this rank holds its own rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from duoka.errors import DuokaError, Refused
from duoka.private.torch import make_wrapper, tree_leaves, tree_map_only
from duoka.view.below import looks_below, unseen
from duoka.view.crossings import Gathered
from duoka.view.cut import Cut
from duoka.view.draws import memory_order
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
        if looks_below():
            with unseen():
                return Spec._together(parts)
        return Spec._together(parts)

    @staticmethod
    def _together(parts: list[tuple[Spec, Tensor]]) -> Tensor:
        spec, local = parts[0]
        home = spec.view.own.home
        if home is not None:
            parts = [(of, rows.to(home)) for of, rows in parts]
        apart = [
            rows.unflatten(spec.dim, (spec.outer, of.cut.rows, spec.inner)).movedim(spec.dim + 1, 0)
            for of, rows in parts
        ]
        whole: Tensor = Gathered.apply(spec.view.own, tuple(of.cut for of, _ in parts), *apart)
        whole = spec.cut.in_order(whole).movedim(0, spec.dim + 1).flatten(spec.dim, spec.dim + 2)
        return whole.contiguous() if local.is_contiguous() else whole


@dataclass(frozen=True, slots=True, eq=False)
class Meta:
    """What is known of a batch without its values. One object for each, so that it is compared by identity.

    shape: the global one. order: of the dimensions in the memory of the whole, where this rank's one row does not
    show it; None: their own.
    """

    spec: Spec
    shape: torch.Size
    dtype: torch.dtype
    local_shape: torch.Size
    order: tuple[int, ...] | None = None

    @staticmethod
    def of(local: Tensor, spec: Spec, order: tuple[int, ...] | None = None) -> Meta:
        """That of the batch of which `local` are this rank's rows.

        Raises:
            AssertionError: the size of its batch dimension is not the share.
        """
        key = spec, local.shape, local.dtype, order
        known: Meta | None = spec.view.metas[key]
        if known is None:
            shape = list(local.shape)
            if shape[spec.dim] != spec.local_size:
                raise AssertionError(
                    f"a tensor of shape {tuple(shape)} does not hold {spec.local_size} rows in dimension {spec.dim}"
                )
            shape[spec.dim] = spec.size
            watch = spec.view.watch
            size = torch.Size(shape) if watch is None else watch.size(shape, spec.dim)
            known = Meta(spec, size, local.dtype, local.shape, order)
            spec.view.metas.keep(key, known)
        return known


class BatchTensor(Tensor):
    """Has the global shape and no storage; `to_local()` is this rank's rows, `full_tensor()` all rows.

    Every torch function of it goes through `dispatch` (dispatch.py).
    """

    _rows: Tensor
    _meta: Meta
    _kept: Any = None  # all rows, gathered (whole.py)
    rules: ClassVar[Mapping[Callable[..., Any], Rule]] = {}
    together: ClassVar[frozenset[Rule]] = frozenset()  # rules that take all own shares at once
    drawing: ClassVar[frozenset[Rule]] = frozenset()  # rules that draw random numbers
    unrecorded: ClassVar[frozenset[Rule]] = frozenset()  # rules that do more than call torch on local tensors
    computing: ClassVar[frozenset[Rule]] = frozenset()  # rules of what models compute with parameters
    dispatch: ClassVar[Callable[..., Any]]

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec) -> BatchTensor:
        """`local`: this rank's rows, tracked by autograd; the size of its batch dimension must be the share."""
        if local.requires_grad and local.is_leaf:
            spec.view.divide_on_arrival(local)
        return cls._made(local, Meta.of(local, spec))

    @staticmethod
    def _made(local: Tensor, meta: Meta) -> BatchTensor:
        """The batch of these rows, of which `meta` is true."""
        batch: BatchTensor = make_wrapper(BatchTensor, meta.shape, dtype=meta.dtype, device=local.device)
        batch._rows, batch._meta = local, meta
        return batch

    @property
    def _spec(self) -> Spec:
        return self._meta.spec

    @property
    def _shares(self) -> tuple[BatchTensor, ...]:
        """The own shares: this one."""
        return (self,)

    @property
    def _local(self) -> Tensor:
        lent = self._meta.spec.view.lent
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
            rows = spec.own(whole)
            # In another dimension they lie apart, and a view on one device would be a copy here.
            rows = rows.contiguous() if whole.is_contiguous() else rows
            # Kernels round by how memory is aligned, and a share's rows may also come by themselves (`of_rows`).
            batch = BatchTensor(rows.clone() if view.own.exact else rows, spec)
            if spec.local_size == 1:
                batch.lies_as(memory_order(whole))
            return batch

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

    def lies_as(self, order: tuple[int, ...]) -> None:
        """Remember how the whole lies in memory: its dimensions, from the slowest to the fastest."""
        if not order == memory_order(self._rows) == tuple(range(len(order))):
            self._meta = Meta.of(self._rows, self._spec, order)

    # What is asked most is answered without asking torch.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._meta.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._meta.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._meta.shape)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._shares[0]._rows.device

    @property
    def is_nested(self) -> bool:  # type: ignore[override]
        return False

    def dim(self) -> int:
        return len(self._meta.shape)

    def size(self, dim: int | None = None) -> Any:
        return self._meta.shape if dim is None else self._meta.shape[dim]

    def __len__(self) -> int:
        watch = self._meta.spec.view.watch
        if watch is not None:
            watch.used = True
        if not self._meta.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._meta.shape[0]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return BatchTensor.dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse what came here past the rules."""
        if func is torch.ops.aten.alias.default:  # `torch.Tensor(x)`, which asks nobody
            return args[0].full_tensor().detach().clone()
        error = Refused(f"{func} came to a batch past duoka's rules ({user_line()}), so it cannot be shared out")
        batches_in((args, kwargs))[0]._spec.view.raised(error)
        raise error


class Joint(BatchTensor):
    """A batch of which this process holds several shares, each a batch tensor as a rank of its own would have it.

    An operation is computed for each. What is the same for all comes from the first, `_meta` too.
    """

    _own: tuple[BatchTensor, ...]

    @staticmethod
    def __new__(cls, shares: Sequence[BatchTensor]) -> Joint:
        """`shares`: the own ones, in their order."""
        meta, rows = shares[0]._meta, shares[0]._rows
        batch: Joint = make_wrapper(cls, meta.shape, dtype=meta.dtype, device=rows.device)
        batch._own, batch._meta = tuple(shares), meta
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


# Scripts print the names of types, and compare classes.
for _kind in (BatchTensor, Joint):
    _kind.__name__ = _kind.__qualname__ = Tensor.__name__
    _kind.__module__ = Tensor.__module__


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
    return tree_map_only(BatchTensor, lambda batch: batch.full_tensor(), tree)  # of its own kind


def batches_in(tree: Any) -> list[BatchTensor]:
    """The batch tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, BatchTensor)]


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITING = frozenset({"__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)})


def may_write(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function may write into what it is given, by its name."""
    name: str = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None


def has_sparse(tree: Any) -> bool:
    """Whether a sparse tensor is in nested containers."""
    return any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in tree_leaves(tree))
