"""Module calls: plain tensors that are a batch become batch tensors, and the model's parameters are kept in step.

Nothing is assumed of a module: its forward pass is Python code that calls torch functions with batch tensors, and
each of these is right by itself (dispatch.py). Which tensors come in as batches matters for speed only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from duoka.private.torch import has_node_hooks
from duoka.view.aliased import version
from duoka.view.dispatch.own_rows import on_own_rows
from duoka.view.modules.compiled import Compiled
from duoka.view.modules.recomputing import computed_again
from duoka.view.shares.partition import Partition
from duoka.view.support.kinds import is_compiled
from duoka.view.support.transforms import looks_below
from duoka.view.tensor.batch import BatchTensor, batches_in, gather_all
from duoka.view.view import View
from duoka.view.vouched import names_of_module

Original = Callable[..., Any]
_DIMS = 2  # dimensions in which the batch of a plain input is looked for


@dataclass(slots=True)
class _Tried:
    """Where the batch of a kind of plain input was looked for: dimension -> functions computed whole."""

    found: dict[int, int] = field(default_factory=dict)
    dim: int | None = None  # once it is settled
    settled: bool = False


@dataclass(frozen=True, slots=True)
class _Lead:
    """A plain input that is taken as a batch, with its samples in `dim`."""

    leaf: Tensor
    dim: int
    tried: _Tried


class _Here(threading.local):
    """What a thread is in: a call in which nothing is shared out; the batch that the outermost module was given."""

    whole = False
    around: Partition | None = None
    outermost = True


class ModuleCalls:
    """Sees every module call of a script.

    converts: whether a plain tensor that comes to a module without a batch may be one.
    """

    def __init__(self, view: View, converts: bool = True) -> None:
        self.view, self._converts = view, converts
        self.local: Partition | None = None  # how the batch is shared out of which plain tensors are this rank's rows
        self._thread = threading.get_ident()
        self._here = _Here()
        self._met: WeakSet[nn.Module] = WeakSet()
        self._tried: WeakKeyDictionary[nn.Module, dict[Any, _Tried]] = WeakKeyDictionary()
        self._compiled = Compiled(view)

    def call(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)` as the script wrote it; `original` is torch's own call."""
        here = self._here
        self._compiled.ran_eagerly(module)
        if here.whole or threading.get_ident() != self._thread:
            return original(module, *args, **kwargs)
        if looks_below() and not is_compiled(module):
            return original(module, *args, **kwargs)
        if looks_below() or _is_opaque(module) or _leaves_out_padding(module):
            return self._whole(original, module, args, kwargs)
        if module in self.view.recomputed and torch.is_grad_enabled():
            original = partial(computed_again, original)
        if not here.outermost:
            if is_compiled(module):
                return self._compiled.call(original, module, *args, **kwargs)
            first = args[0] if args else None
            if here.around is None or type(first) is not Tensor or first.shape[:1] != (here.around.n,):
                return original(module, *args, **kwargs)
            return self._converted(original, module, args, kwargs, here.around)
        return self._outermost(original, module, args, kwargs)

    @contextmanager
    def computed_whole(self) -> Iterator[None]:
        """Within, this thread shares out nothing that is not a batch tensor already."""
        before, self._here.whole = self._here.whole, True
        try:
            yield
        finally:
            self._here.whole = before

    @property
    def is_outermost(self) -> bool:
        """Whether no call with a batch is going on in this thread."""
        return self._here.outermost

    @property
    def is_whole(self) -> bool:
        """Whether this thread is within `computed_whole`."""
        return self._here.whole

    def given(self, module: nn.Module) -> None:
        """A module was given a parameter or a part."""
        self._met.discard(module)

    # --- the ways to run a call

    def _outermost(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        here = self._here
        batch = next(iter(batches_in((args, kwargs))), None)
        plain = list(_plain_in((*args, *kwargs.values())))
        lead = self._lead(module, plain) if batch is None and self._converts else None
        if batch is None and lead is None:
            return original(module, *args, **kwargs)
        self._meet(module)
        partition = batch._spec.partition if batch is not None else self.view.partition(lead.leaf.shape[lead.dim])  # type: ignore[union-attr]
        here.outermost, here.around = False, partition
        if is_compiled(module):
            original = partial(self._compiled.call, original)
        try:
            if lead is not None:
                return self._led(original, module, args, kwargs, lead)
            if any(holds(leaf, partition.n) for leaf in plain):
                return self._converted(original, module, args, kwargs, partition)
            return original(module, *args, **kwargs)
        finally:
            here.outermost, here.around = True, None

    def _meet(self, module: nn.Module) -> None:
        """The first call of a module with a batch: the same parameters and buffers on all ranks from now on."""
        if module in self._met or any(map(is_lazy, module.parameters())):
            return
        self._met.add(module)
        self.view.take_in(module)
        for parameter in module.parameters():
            self.view.adopt(parameter)
        for buffer in module.buffers():
            self.view.shares.ranks.broadcast_into(buffer, 0)

    def _whole(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Every rank computes all rows of a call of which the rules see nothing."""
        with self.computed_whole():
            if not batches_in((args, kwargs)):
                return original(module, *args, **kwargs)
            name = self.view.vouched.name_of(names_of_module(module))
            if name is not None and not looks_below() and not self.view.shares.exact and self.view.shares.count == 1:
                self._meet(module)
                return on_own_rows(name, partial(original, module), args, kwargs)
            with self.view.gathered.timed(names_of_module(module)[0]):
                args, kwargs = gather_all((args, kwargs))
                return original(module, *args, **kwargs)

    def _converted(
        self,
        original: Original,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        partition: Partition,
    ) -> Any:
        """The call with plain tensors of as many rows as the batch as batches, too."""
        dims = {id(leaf): 0 for leaf in _plain_in((*args, *kwargs.values())) if holds(leaf, partition.n)}
        return self._with_batches(original, module, args, kwargs, dims)

    def _led(
        self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], lead: _Lead
    ) -> Any:
        """The call of which the batch is a plain tensor."""
        n, tried = lead.leaf.shape[lead.dim], lead.tried
        dims = {id(leaf): 0 for leaf in _plain_in((*args, *kwargs.values())) if holds(leaf, n)}
        before = self.view.gathered.total()
        out = self._with_batches(original, module, args, kwargs, {**dims, id(lead.leaf): lead.dim})
        if not tried.settled:
            lost = self.view.gathered.total() - before
            tried.found[lead.dim] = lost if lost == 0 or batches_in(out) else 2 * lost
            _settle(tried, lead.leaf, self.view, out)
        return out

    def _with_batches(
        self,
        original: Original,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: dict[int, int],
    ) -> Any:
        """The call with batches in place of plain tensors. dims: by their identity, where the samples are."""
        given: list[tuple[Tensor, list[int], BatchTensor]] = []

        def swapped(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(map(swapped, value))
            if id(value) not in dims:
                return value
            batch = BatchTensor.of(value, self.view, dims[id(value)])
            given.append((value, _versions(value, batch), batch))
            return batch

        out = original(module, *map(swapped, args), **{name: swapped(value) for name, value in kwargs.items()})
        for leaf, before, batch in given:
            if _versions(leaf, batch) != before:  # own rows were written into
                with torch.no_grad():
                    leaf.copy_(batch.full_tensor())
        return out

    def _lead(self, module: nn.Module, plain: list[Tensor]) -> _Lead | None:
        """The plain input that could be a batch that was cut by hand, and its dimension.

        Any choice is right. Sequences may lie time first, so the second dimension is tried, too, if along the first
        something had to be computed whole; the better one is kept.
        """
        leaf = next((leaf for leaf in plain if leaf.dim()), None)
        if leaf is None:
            return None
        dims = [dim for dim, size in enumerate(leaf.shape[:_DIMS]) if self.view.splits(size)]
        if not dims or dims[0] != 0:  # a small batch
            return None
        kind = leaf.dim(), leaf.dtype, tuple(dims), module.training
        tried = self._tried.setdefault(module, {}).setdefault(kind, _Tried())
        if not tried.settled:
            return _Lead(leaf, next(dim for dim in dims if dim not in tried.found), tried)
        return None if tried.dim is None else _Lead(leaf, tried.dim, tried)


def _plain_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The plain tensors among arguments, and in tuples of theirs: not in what a module may keep or fill."""
    for value in values:
        if type(value) is Tensor:
            yield value
        elif type(value) is tuple:
            yield from _plain_in(value)


def _settle(tried: _Tried, leaf: Tensor, view: View, out: Any) -> None:
    """Decide where the batch is, when it is known what each choice costs."""
    dims = [dim for dim, size in enumerate(leaf.shape[:_DIMS]) if view.splits(size)]
    best = min(tried.found, key=lambda dim: tried.found[dim])
    if tried.found[best] and any(dim not in tried.found for dim in dims):
        return
    tried.settled = True
    tried.dim = None if tried.found[best] and not batches_in(out) else best


def _is_opaque(module: nn.Module) -> bool:
    """Whether what a call does is not seen as calls of torch functions: TorchScript, hooks on nodes of the graph."""
    return isinstance(module, torch.jit.ScriptModule) or has_node_hooks(module)


def _leaves_out_padding(module: nn.Module) -> bool:
    """Whether torch takes another way with plain tensors, on which padded positions become 0."""
    fast = isinstance(module, nn.TransformerEncoder) and not module.training and not torch.is_grad_enabled()
    return fast and bool(module.use_nested_tensor)


def holds(leaf: Any, n: int, dim: int = 0) -> bool:
    """Whether a plain input has n rows, and is no square of n, which is rather a mask of a sequence."""
    return type(leaf) is Tensor and leaf.shape[dim : dim + 1] == (n,) and leaf.shape != (n, n)


def _versions(leaf: Tensor, batch: BatchTensor) -> list[int]:
    """What changes where a plain tensor is written into, or the rows that were taken of it."""
    return [version(leaf), *(version(share._rows) for share in batch._shares)]
