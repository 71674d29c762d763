"""The batch tensor: a tensor subclass with the shape of a global batch that holds this rank's rows of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor
from torch.overrides import enable_reentrant_dispatch

from duoka.errors import DuokaError, Refused
from duoka.private.torch import make_wrapper, set_version, tree_leaves, tree_map_only
from duoka.system.user_code import user_line
from duoka.view.copy_memory import CopyMemory
from duoka.view.shares.layout import laid_out
from duoka.view.shares.strides import Strides, without_repetitions
from duoka.view.tensor.spec import Meta, Spec
from duoka.view.view import View

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Function, Args, Kwargs], Any]


class Traits(NamedTuple):
    """What is known of a rule."""

    once_for_all_shares: bool = False  # it is called once for all local shares
    draws: bool = False  # it draws random numbers
    unrecorded: bool = False  # it does more than call torch functions on local tensors
    views: bool = False  # its function may return a view of a batch, or raises an error because of strides
    computes: bool = False  # its function is one of what models compute with parameters


NO_TRAITS = Traits()


class BatchTensor(Tensor):
    """A tensor with the shape of a global batch and no storage; `_rows` are this rank's rows.

    Every torch function called with it is handled by `dispatch` (`dispatch/dispatch.py`).
    """

    _rows: Tensor
    _meta: Meta
    _cached: Any = None  # a gathered copy (whole.py)
    _gradient: Any = None  # the gradient of its rows if it is a leaf, and the batch of it that the script knows
    _range: Any = None  # that its values are known to be in (dispatch/failing.py)
    _shown_device: torch.device | None = None  # of an offloaded parameter: that to which the script has moved it
    # Set by rules/__init__.py and dispatch/native.py, which import this file:
    rules: ClassVar[Mapping[Callable[..., Any], Rule]] = {}  # torch function -> rule
    traits: ClassVar[Mapping[Rule, Traits]] = {}
    dispatch: ClassVar[Callable[..., Any]]  # calls a function with batches: dispatch/dispatch.py
    program: ClassVar[Callable[..., Any]]  # makes a program of recorded calls
    keep: ClassVar[Callable[..., Any]]  # lets the engine find a program from now on
    remake: ClassVar[Callable[..., Any]]  # makes a batch of the rows that a program has computed

    @classmethod
    def known(cls, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a rule that is called, or that one of duoka's or a library's wraps; else `func`.

        torch passes what stands in place of a method, though it was called with the arguments of the method itself.
        """
        inner: Any = func
        while inner is not None and inner not in cls.rules:
            inner = getattr(inner, "__wrapped__", None)
        return func if inner is None else inner

    @classmethod
    def traits_of(cls, func: Callable[..., Any]) -> Traits:
        """Return what is known of the rule of a torch function; of one without a rule nothing is."""
        rule = cls.rules.get(cls.known(func))
        return NO_TRAITS if rule is None else cls.traits.get(rule, NO_TRAITS)

    @staticmethod
    def __new__(cls, local: Tensor, spec: Spec, strides: Strides | None = None) -> BatchTensor:
        """Make a batch of this rank's rows `local`, which autograd tracks. strides: of the whole batch, if known."""
        if local.requires_grad and local.is_leaf:
            spec.view.divide_gradient(local)
        return cls._made(local, Meta.of(local, spec, strides))

    @staticmethod
    def _made(local: Tensor, meta: Meta) -> BatchTensor:
        """Make a batch of rows whose Meta is known."""
        batch: BatchTensor = make_wrapper(BatchTensor, meta.shape, dtype=meta.dtype, device=local.device)
        batch._rows, batch._meta = local, meta
        return batch

    @property
    def _spec(self) -> Spec:
        return self._meta.spec

    @property
    def _shares(self) -> tuple[BatchTensor, ...]:
        """The batch tensors of the local shares."""
        return (self,)

    @property
    def _local(self) -> Tensor:
        """This rank's rows, up to date.

        First it copies into them what the script wrote to copies of the batch (`aliased.py`). `_rows` are the same
        tensor without that step, for its shape, dtype, version and identity only.
        """
        aliased = self._meta.spec.view.aliased
        if aliased.copies:
            aliased.write_back(self._rows)
        return self._rows

    def to_local(self) -> Tensor:
        """Return this rank's rows as a plain tensor that shares memory and the autograd graph with the batch."""
        return self._local

    def full_tensor(self) -> Tensor:
        """All-gather the rows; every rank must call it."""
        full = laid_out(self._spec.gather(self._local), self._meta.strides)
        note_gathered(self, full)
        return full

    @classmethod
    def of(cls, full: Tensor, view: View, dim: int = 0) -> BatchTensor:
        """Split a replicated tensor, with its samples in `dim`."""

        def share(index: int) -> BatchTensor:
            sibling = view.siblings[index]
            spec = Spec(sibling, sibling.partition(full.shape[dim]), dim)
            strides = spec.strides_of(full)
            # Kernels round differently by alignment, which must not depend on how the rows came here (`of_rows`);
            # autograd records no writes to views of what `Replicate` returns; and no other tensor has their memory.
            rows, local_strides = spec.local_rows(full), spec.local_strides(strides)
            copy = without_repetitions(rows, local_strides).clone()
            rows = laid_out(copy if copy.shape == rows.shape else copy.expand(rows.shape), local_strides)
            return BatchTensor(rows, spec, strides)

        return join(view.shares.each(share))

    @classmethod
    def of_rows(cls, rows: Tensor, n: int, view: View, weights: tuple[float, ...] | None = None) -> BatchTensor:
        """Make a batch of n samples of the rows of this process, which are stacked samples.

        weights: with which the rows were read (`View.partition`).
        """
        specs = [Spec(sibling, sibling.partition(n, weights)) for sibling in view.siblings]
        strides: Strides | None = None
        if not specs[0].determines_strides and rows.numel():
            strides = rows[0].numel(), *rows.stride()[1:]  # torch.stack puts samples one after the other

        def share(part: Tensor, spec: Spec) -> BatchTensor:
            part = part if strides is None else laid_out(part, spec.local_strides(strides))
            return BatchTensor(part, spec, strides)

        if not view.shares.several:
            return share(rows, specs[0])
        parts = rows.split([spec.partition.rows for spec in specs])
        # Copied, as rounding must not depend on the alignment within other shares' memory.
        return join([share(part.clone(), spec) for part, spec in zip(parts, specs, strict=True)])

    # Frequent queries are answered here, without a dispatch.

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
        return self._shown_device or self._shares[0]._rows.device

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

    def __copy__(self) -> BatchTensor:
        """Return a leaf of the same memory with a count of writes of its own, as `copy.copy` does of a tensor."""
        copy: BatchTensor = self.data.requires_grad_(self.requires_grad)  # type: ignore[assignment]
        for share in copy._shares:
            set_version(share._rows, 1)
        return self._with_attributes(copy, self._attributes())

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchTensor:
        """Return a copy, whose memory is that of other copies with this memo, as with the batches.

        No rule: the memo may hold batches of another view, as those of a sharded model's state.
        """
        shares = zip(self._shares, rows_by_share(self), strict=True)
        copies = [BatchTensor(deepcopy(rows, memo), share._spec, share._meta.strides) for share, rows in shares]
        self._copy_held(memo)
        return self._with_attributes(join(copies), deepcopy(self._attributes(), memo))

    def _copy_held(self, memo: dict[int, Any]) -> None:
        """Let the copies, with this memo, of the batch and of what the script has taken of it be of one memory."""
        rows_of, view = [share._rows for share in self._shares], self._spec.view
        of_shares = view.shares.each(lambda index: view.siblings[index].aliased.held_anywhere(rows_of[index]))
        held = [copy for copy in of_shares if copy is not None]
        if held:
            parts = [(copy.spec, deepcopy(copy.rows, memo)) for copy in held]
            copied = CopyMemory(deepcopy(held[0].full, memo), parts, 1)
            for copy, (spec, rows) in zip(held, parts, strict=True):
                spec.view.aliased.add(rows, spec, copy.strides, copied)

    def _attributes(self) -> dict[str, Any]:
        """Return the attributes that the script has set."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def _with_attributes(self, copy: BatchTensor, attributes: dict[str, Any]) -> BatchTensor:
        vars(copy).update(attributes)
        copy._shown_device = self._shown_device
        return copy

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Where _replay.c was built, its `call` stands in place of this method (native.py).
        return BatchTensor.dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operators that bypassed `__torch_function__`."""
        if func is torch.ops.aten.alias.default:  # `torch.Tensor(x)`
            with enable_reentrant_dispatch():
                return args[0][...]
        error = Refused(
            f"{func} was called on a batch without a torch function ({user_line()}): duoka cannot split it"
        )
        batches_in((args, kwargs))[0]._spec.view.raised(error)
        raise error


class MultiShareBatch(BatchTensor):
    """A batch of which this process has several shares, each a BatchTensor as a rank would have it.

    Operations are computed for each share. What is the same for all, such as `_meta`, is taken from the first.
    """

    _by_share: tuple[BatchTensor, ...]

    @staticmethod
    def __new__(cls, shares: Sequence[BatchTensor]) -> MultiShareBatch:
        """Combine the local shares, in order."""
        meta, rows = shares[0]._meta, shares[0]._rows
        batch: MultiShareBatch = make_wrapper(cls, meta.shape, dtype=meta.dtype, device=rows.device)
        batch._by_share = tuple(shares)
        return batch

    @property
    def _meta(self) -> Meta:  # type: ignore[override]
        return self._by_share[0]._meta

    @property
    def _shares(self) -> tuple[BatchTensor, ...]:
        return self._by_share

    @property
    def _rows(self) -> Tensor:  # type: ignore[override]
        raise AssertionError("a batch of several shares has no single tensor of rows")

    @property
    def _local(self) -> Tensor:
        raise AssertionError("a batch of several shares has no single tensor of rows")

    def to_local(self) -> Tensor:
        """Return this process's rows, a copy that shares the batch's gradient."""
        dim, outer, inner = self._spec.dim, self._spec.outer, self._spec.inner
        shares = zip(self._by_share, rows_by_share(self), strict=True)
        apart = [rows.unflatten(dim, (outer, share._spec.partition.rows, inner)) for share, rows in shares]
        together: Tensor = torch.cat(apart, dim + 1).flatten(dim, dim + 2)
        return together

    def full_tensor(self) -> Tensor:
        parts = [(share._spec, rows) for share, rows in zip(self._by_share, rows_by_share(self), strict=True)]
        full = laid_out(Spec.gather_shares(parts), self._meta.strides)
        note_gathered(self, full)
        return full


_OWN = {*BatchTensor.__annotations__, *MultiShareBatch.__annotations__}


def note_gathered(batch: BatchTensor, full: Tensor) -> None:
    """Note a gathered copy of a batch, which autograd may save."""
    for share in batch._shares:
        share._spec.view.saved.note_gathered(share._rows, share._spec, batch._meta.strides, full)


# Scripts print the names of types.
for _kind in (BatchTensor, MultiShareBatch):
    _kind.__name__ = _kind.__qualname__ = Tensor.__name__
    _kind.__module__ = Tensor.__module__


def set_rows(set_on: Callable[[Tensor], Tensor], full: Tensor, spec: Spec) -> Strides:
    """Set data or a gradient to a rank's rows of a plain tensor, which share its memory.

    set_on: is given the rows, and returns the tensor that has them now. Returns the strides of the batch.
    """
    aliased, strides = spec.view.aliased, spec.strides_of(full)
    if (known := aliased.rows_of(full, spec)) is not None:
        set_on(known)
        return strides
    rows = set_on(laid_out(spec.local_rows(full.detach()).clone(), spec.local_strides(strides)))
    holders = int(full.untyped_storage().resizable())  # else something else holds the memory, such as an array
    aliased.add(rows, spec, strides, CopyMemory(full.detach(), [(spec, rows)], holders))
    return strides


def of_share(value: Any, index: int) -> Any:
    """Replace each batch in nested containers by its local share with this index."""
    return tree_map_only(MultiShareBatch, lambda batch: batch._by_share[index], value)


def rows_by_share(tensor: Tensor) -> list[Tensor]:
    """Return the rows of a batch in each local share, up to date; of another tensor itself."""
    if not isinstance(tensor, MultiShareBatch):
        return [tensor._local if isinstance(tensor, BatchTensor) else tensor]
    shares = tensor._by_share
    if any(share._spec.view.aliased.copies for share in shares):  # to write one back with a gradient needs all shares
        tensor._spec.view.shares.each(lambda index: shares[index]._local)
    return [share._rows for share in shares]


def join(shares: Sequence[BatchTensor]) -> BatchTensor:
    """Combine local shares into one batch."""
    return MultiShareBatch(shares) if shares[0]._spec.view.shares.several else shares[0]


def join_results(outs: Sequence[Any], batches: Sequence[MultiShareBatch] = ()) -> Any:
    """Combine the results of the local shares: batches are joined, anything else is the first share's.

    batches: among the arguments. A result that is a share of one of these becomes that batch itself, and what the
    shares return twice becomes one batch.
    """
    return _join_nested(outs, {id(batch._by_share[0]): batch for batch in batches})


def _join_nested(outs: Sequence[Any], known: dict[int, BatchTensor]) -> Any:
    """Combine results, as `join_results`. known: batches by the identity of their first share."""
    first = outs[0]
    if isinstance(first, BatchTensor):
        if id(first) not in known:
            known[id(first)] = join(outs)
        return known[id(first)]
    if isinstance(first, dict):
        joined = copy(first)  # of the same type
        for key in first:
            joined[key] = _join_nested([out[key] for out in outs], known)
        return joined
    if isinstance(first, (tuple, list)) and not isinstance(first, torch.Size):
        return like(first, [_join_nested(parts, known) for parts in zip(*outs, strict=True)])
    return first


def call_each_share(call: Callable[[Args, Kwargs], Any], args: Args, kwargs: Kwargs, draws: bool = False) -> Any:
    """Make `call(args, kwargs)` for each local share of the batches among the arguments, and combine the results.

    draws: as for `LocalShares.each`.
    """
    batches = [batch for batch in batches_in((args, kwargs)) if isinstance(batch, MultiShareBatch)]
    shares = batches[0]._spec.view.shares
    calls = [of_share((args, kwargs), index) for index in range(shares.count)]
    generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Generator)] if draws else []
    return join_results(shares.each(lambda index: call(*calls[index]), draws, generators), batches)


def like(value: Any, parts: list[Any]) -> Any:
    """Make a (named) tuple or list of the same type."""
    kind = type(value)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def whole_like(batch: BatchTensor) -> Tensor:
    """Return a tensor of the batch's global shape that repeats this rank's rows, without communication."""
    batch = batch._shares[0]
    spec = batch._spec
    apart = batch._rows.detach().unflatten(spec.dim, (spec.outer, spec.partition.rows, spec.inner))
    places = torch.arange(spec.partition.n, device=batch.device) % spec.partition.rows
    full: Tensor = apart.index_select(spec.dim + 1, places).flatten(spec.dim, spec.dim + 2)
    return full


def whole_batch_error(error: Exception, view: View, again: Callable[[], object]) -> Exception:
    """Return the error that one device would raise, with the shapes of the global batch.

    again: makes the same call with a whole batch of other values, which is no part of a graph. If it raises another
    error of the same kind, or none, the rows' values or the graph were the cause, and `error` itself is returned.
    """
    if not isinstance(error, (RuntimeError, ValueError)) or isinstance(error, (DuokaError, torch.OutOfMemoryError)):
        return error
    before, view.ranks.isolated = view.ranks.isolated, True
    try:
        again()
    except Exception as raised:
        of_torch = type(raised) in (RuntimeError, ValueError)
        # F.group_norm of one row raises a ValueError where that of several raises torch's error of shapes.
        of_shapes = isinstance(raised, ValueError) != isinstance(error, ValueError)
        alike = _NUMBER.sub("#", str(raised)) == _NUMBER.sub("#", str(error))
        return raised.with_traceback(error.__traceback__) if of_torch and (of_shapes or alike) else error
    finally:
        view.ranks.isolated = before
    return error


def gather_all(tree: Any) -> Any:
    """All-gather every batch tensor in nested containers."""
    return tree_map_only(BatchTensor, lambda batch: batch.full_tensor(), tree)  # subclasses override it


def batches_in(tree: Any) -> list[BatchTensor]:
    """Return the batch tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, BatchTensor)]


_NUMBER = re.compile(r"\d+")
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_gradient: Any = Tensor.grad
_SET_GRADIENT = _gradient.__set__
_data: Any = Tensor.data
SET_DATA = _data.__set__
_WRITING = frozenset({"__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS)})


def may_write(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a torch function may write to its arguments, judged by its name, `out` and `inplace`."""
    name: str = getattr(func, "__name__", "")
    if func == _SET_GRADIENT:
        return False
    writes = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
    return writes or kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def has_sparse(tree: Any) -> bool:
    """Return True if nested containers hold a sparse tensor."""
    return any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in tree_leaves(tree))
