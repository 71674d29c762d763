"""Module calls: convert plain inputs that are a batch, and synchronize the model's parameters.

Nothing is assumed about a module: its forward pass is Python code that calls torch functions with batch tensors, and
each of these is computed correctly by itself (`dispatch/dispatch.py`). Converting inputs only matters for speed.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from operator import is_
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from duoka.private.torch import (
    INTERNAL_OF_MODULES,
    has_node_hooks,
    is_compiled_call,
    outer_saved_tensors_hooks,
    tree_map_only,
    uncounted,
)
from duoka.view.dispatch import native
from duoka.view.dispatch.failing import note_range
from duoka.view.dispatch.own_rows import names_of_module, on_own_rows
from duoka.view.memory import same_memory, version
from duoka.view.modules.compiled import Compiled, ThreadState, is_compiled
from duoka.view.modules.fast_paths import (
    WITH_FAST_PATH,
    leaves_out_padding,
    pads_alike,
    takes_rows,
    with_whole_parameters,
)
from duoka.view.modules.recomputing import computed_again
from duoka.view.recent import KEPT, Recent
from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import (
    Args,
    BatchTensor,
    Kwargs,
    batches_in,
    gather_all,
    like,
    rows_by_share,
    whole_batch_error,
    whole_like,
)
from duoka.view.transforms import operators_are_observed
from duoka.view.view import View

Original = Callable[..., Any]
_DIMS = 2  # the leading dimensions in which the samples of a plain input may be


@dataclass(slots=True)
class _DimSearch:
    """The search for the samples' dimension in a kind of plain input."""

    costs: dict[int, int] = field(default_factory=dict)  # dimension -> functions that were computed whole with it
    dim: int | None = None  # the result; None: the input is not split
    decided: bool = False


@dataclass(frozen=True, slots=True)
class _PlainBatch:
    """A plain input that is split, with its samples in `dim`."""

    leaf: Tensor
    dim: int
    search: _DimSearch


@dataclass(frozen=True, slots=True)
class _Given:
    """A plain input and the batch that a module gets in its place."""

    leaf: Tensor
    batch: BatchTensor
    versions: list[int]  # of both before the call
    histories: list[Any]  # the batch's at that time

    def write_back(self) -> None:
        """Copy what the module has written to the batch, with its gradient, into the plain tensor."""
        if _versions(self.leaf, self.batch) == self.versions:
            return
        shares_memory = any(same_memory(self.leaf, share._rows) for share in self.batch._shares)
        with torch.set_grad_enabled(_histories(self.batch) != self.histories):
            full = self.batch.full_tensor()
            # In memory that both share this rank's rows stay what they are, and the module may have saved them.
            with uncounted(self.leaf) if shares_memory else nullcontext():
                self.leaf.copy_(full)

    def note(self) -> None:
        """Note that autograd may have saved the batch: what the script writes to the plain tensor is to reach it."""
        for share in self.batch._shares:
            share._spec.view.saved.note_split(share._rows, share._spec, self.leaf)


def _references(given: Any) -> int:
    """Return the number of references to the batch of a `_Given`."""
    return sys.getrefcount(given.batch)


_OF_GIVEN = _references(_Given(torch.empty(0), cast(BatchTensor, object()), [], []))  # Python's versions count apart


def _with_leaves(value: Any, leaves: dict[int, Tensor], seen: set[int]) -> Any:
    """Put plain inputs in place of their batches in nested containers, which stay the same objects but for tuples.

    leaves: by the identity of the batch. seen: identities of containers.
    """
    if id(value) in leaves:
        return leaves[id(value)]
    if isinstance(value, tuple):
        parts = [_with_leaves(part, leaves, seen) for part in value]
        return value if all(map(is_, parts, value)) else like(value, parts)
    if is_dataclass(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        _with_leaves(vars(value), leaves, seen)
    if isinstance(value, (dict, list, deque)) and id(value) not in seen:
        seen.add(id(value))
        for key, part in [*value.items()] if isinstance(value, dict) else enumerate(value):
            if key not in INTERNAL_OF_MODULES and (changed := _with_leaves(part, leaves, seen)) is not part:
                value[key] = changed
    return value


class ModuleCalls:
    """Handles every module call of a script.

    converts: True if a plain input of a module without batches among its inputs may be one.
    """

    def __init__(self, view: View, converts: bool = True) -> None:
        self.view, self._converts = view, converts
        self._thread = threading.get_ident()  # the script's, which alone may communicate
        self._here = ThreadState()  # its `ordinary` is read by _replay.c
        self._synchronized: WeakSet[nn.Module] = WeakSet()
        self._searches: WeakKeyDictionary[nn.Module, dict[Any, _DimSearch]] = WeakKeyDictionary()
        self._compiled = Compiled(view, self._here)
        self._ordinary = Recent(KEPT)  # class -> False if its modules are compiled, or have a fast path
        # call(original, module, args, kwargs): make the call `module(*args, **kwargs)` of the script; `original` is
        # torch's `nn.Module.__call__`.
        in_c = native.chosen()
        self.call = self._in_python if in_c is None else partial(in_c.call_module, self)

    def _in_python(self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Make a call; nothing else is to be done for an ordinary module with a batch within another's call."""
        is_ordinary = (
            bool(args)
            and type(args[0]) is BatchTensor
            and bool(self._here.ordinary.get(type(module)))
            and not (has_node_hooks(module) or is_compiled_call(module))
        )
        return original(module, *args, **kwargs) if is_ordinary else self.unusual(original, module, args, kwargs)

    def unusual(self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Make a call of a module that may not be ordinary, or without a batch."""
        here = self._here
        self._compiled.ran_eagerly(module)
        if threading.get_ident() != self._thread:
            return original(module, *args, **kwargs)
        if here.computes_whole:
            with with_whole_parameters(module) if here.leaves_out_padding else nullcontext():
                return original(module, *args, **kwargs)
        if operators_are_observed() and not is_compiled(module):
            return original(module, *args, **kwargs)  # a mode of the script's sees what it calls
        if operators_are_observed() or _is_opaque(module):
            return self._of_all_rows(original, module, args, kwargs)
        if takes_rows(module, args, kwargs):
            if pads_alike(module, args, kwargs):
                return self._on_rows(original, module, args, kwargs)
        elif leaves_out_padding(module):
            return self._of_all_rows(partial(self._without_padding, original), module, args, kwargs)
        if module in self.view.recomputed and torch.is_grad_enabled():
            original = partial(computed_again, original)
        if not here.outermost:
            return self._inner(original, module, args, kwargs)
        return self._outermost(original, module, args, kwargs)

    @contextmanager
    def computed_whole(self) -> Iterator[None]:
        """Split no plain inputs of modules that this thread calls in this context."""
        here = self._here
        before = here.computes_whole, here.ordinary
        here.computes_whole, here.ordinary = True, {}
        try:
            yield
        finally:
            here.computes_whole, here.ordinary = before

    @property
    def is_whole(self) -> bool:
        """True within `computed_whole`."""
        return self._here.computes_whole

    def as_now(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls modules as this thread does now: it may be computed again elsewhere."""
        now = vars(self._here).copy()

        def call(*args: Any, **kwargs: Any) -> Any:
            here = vars(self._here)
            before = here.copy()
            here.clear()
            here.update(now)
            try:
                return function(*args, **kwargs)
            finally:
                here.clear()
                here.update(before)

        return call

    def synchronize(self, module: nn.Module) -> None:
        """Make parameters and buffers equal on all ranks, if they are not yet: before the first call with a batch."""
        if module in self._synchronized or any(map(is_lazy, module.parameters())):
            return
        self._synchronized.add(module)
        self.view.prepare_model(module)
        ranks = self.view.shares.processes
        with ranks.coalesced_broadcasts():
            for parameter in module.parameters():
                self.view.adopt(parameter)
            for buffer in module.buffers():
                if not isinstance(buffer, BatchTensor):  # a queue of rows; each rank has its own
                    ranks.broadcast_into(buffer, 0)

    def changed(self, module: nn.Module) -> None:
        """Synchronize a module again at its next call, because a parameter or a submodule was added to it."""
        self._synchronized.discard(module)

    # --- kinds of calls

    def _inner(self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Call a submodule; split a plain first input that has as many rows as the outermost module's batch."""
        if is_compiled(module):
            return self._compiled.call(original, module, *args, **kwargs)
        if self._ordinary[type(module)] is None:
            self._ordinary.keep(type(module), not isinstance(module, WITH_FAST_PATH))
        around = self._here.around
        first = args[0] if args else None
        if around is None or not holds(first, around.n):
            return original(module, *args, **kwargs)
        return self._with_split_inputs(original, module, args, kwargs, around)

    def _outermost(self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        if module not in self._synchronized and next(iter(module.parameters()), None) is None:  # it may be a list
            return original(module, *args, **kwargs)  # a loss or an activation: nothing to synchronize
        here = self._here
        first = args[0] if args else None
        batch = first if type(first) is BatchTensor else next(iter(batches_in((args, kwargs))), None)
        plain = list(_plain_in((*args, *kwargs.values())))
        plain_batch = self._plain_batch(module, plain) if batch is None and self._converts else None
        if batch is None and plain_batch is None:
            return original(module, *args, **kwargs)
        self.synchronize(module)
        if plain_batch is not None:
            partition = self.view.partition(plain_batch.leaf.shape[plain_batch.dim])
        else:
            partition = batch._spec.partition  # type: ignore[union-attr]
        here.outermost, here.around = False, partition
        here.ordinary = {} if self.view.recomputed else self._ordinary
        if is_compiled(module):
            original = partial(self._compiled.call, original)
        try:
            if plain_batch is not None:
                return self._with_plain_batch(original, module, args, kwargs, plain_batch)
            if any(holds(leaf, partition.n) for leaf in plain):
                return self._with_split_inputs(original, module, args, kwargs, partition)
            return original(module, *args, **kwargs)
        finally:
            here.outermost, here.around, here.ordinary = True, None, {}

    def _of_all_rows(self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Compute all rows on every rank, for a module whose operations have no rules."""
        with self.computed_whole():
            if not batches_in((args, kwargs)):
                return original(module, *args, **kwargs)
            name = self.view.row_independent.name_of(names_of_module(module))
            if name is not None and not operators_are_observed() and not self.view.shares.exact:
                self.synchronize(module)
                return on_own_rows(name, partial(original, module), args, kwargs)
            with self.view.whole_operations.timed(names_of_module(module)[0]):
                args, kwargs = gather_all((args, kwargs))
                return original(module, *args, **kwargs)

    def _on_rows(self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Call a module with the local rows of its batches."""
        if self._here.outermost:
            self.synchronize(module)
        if self.view.has_sharded:
            original = partial(self._without_padding, original)
        make = partial(original, module)
        with self.computed_whole():
            try:
                return on_own_rows(type(module).__name__, make, args, kwargs, draws=False)
            except Exception as error:
                full = tree_map_only(BatchTensor, whole_like, (args, kwargs))
                raise whole_batch_error(error, self.view, lambda: make(*full[0], **full[1])) from None

    def _without_padding(self, original: Original, encoder: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call an encoder, which decides by its first layer's parameters whether padding is left out."""
        here = self._here
        with with_whole_parameters(encoder.layers[0]):  # type: ignore[index,arg-type]
            here.leaves_out_padding = True
            try:
                return original(encoder, *args, **kwargs)
            finally:
                here.leaves_out_padding = False

    def _with_split_inputs(
        self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs, partition: Partition
    ) -> Any:
        """Make a call in which plain inputs with as many rows as the batch are split, too."""
        dims = {id(leaf): 0 for leaf in _plain_in((*args, *kwargs.values())) if holds(leaf, partition.n)}
        return self._with_batches(original, module, args, kwargs, dims)

    def _with_plain_batch(
        self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs, plain_batch: _PlainBatch
    ) -> Any:
        """Make a call whose batch is a plain input, and note what was computed whole."""
        n, search = plain_batch.leaf.shape[plain_batch.dim], plain_batch.search
        dims = {id(leaf): 0 for leaf in _plain_in((*args, *kwargs.values())) if holds(leaf, n)}
        before = self.view.whole_operations.total()
        out = self._with_batches(original, module, args, kwargs, {**dims, id(plain_batch.leaf): plain_batch.dim})
        if not (search.decided or outer_saved_tensors_hooks()):  # a checkpointed call is repeated with the same split
            cost = self.view.whole_operations.total() - before
            search.costs[plain_batch.dim] = cost if cost == 0 or batches_in(out) else 2 * cost
            _decide(search, plain_batch.leaf, self.view, out)
        return out

    def _with_batches(
        self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs, dims: dict[int, int]
    ) -> Any:
        """Make the call with some plain inputs split. dims: identity of an input -> dimension of its samples."""
        inputs: dict[int, _Given] = {}  # by the identity of the plain tensor, which may come twice

        def swapped(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(map(swapped, value))
            if id(value) not in dims:
                return value
            if id(value) in inputs:
                return inputs[id(value)].batch
            batch = BatchTensor.of(value, self.view, dims[id(value)])
            if isinstance(module, nn.Embedding) and value.is_cpu and value.numel():
                least, most = value.aminmax()
                note_range(batch, int(most) + 1 if least >= 0 else sys.maxsize)
            inputs[id(value)] = _Given(value, batch, _versions(value, batch), _histories(batch))
            return batch

        try:
            out = original(module, *map(swapped, args), **{name: swapped(value) for name, value in kwargs.items()})
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError):  # of shapes, so on every rank
            for given in inputs.values():
                given.write_back()
            raise
        for given in inputs.values():
            given.write_back()
            given.note()
        # The module may keep it, return it, or put it into an argument.
        kept = [given for given in inputs.values() if _references(given) > _OF_GIVEN]
        if not kept:
            return out
        leaves = {id(given.batch): given.leaf for given in kept}
        seen: set[int] = set()
        for holder in (*map(vars, module.modules()), args, kwargs):
            _with_leaves(holder, leaves, seen)
        return _with_leaves(out, leaves, seen)

    def _plain_batch(self, module: nn.Module, plain: list[Tensor]) -> _PlainBatch | None:
        """Return the plain input to split as a batch, and the dimension of its samples; None if none is split.

        Any choice gives the right numbers. Sequences may be time-first, so the second dimension is tried, too, if
        with the first something had to be computed whole; the cheaper one is kept.
        """
        leaf = next((leaf for leaf in plain if leaf.dim()), None)
        if leaf is None:
            return None
        dims = [dim for dim, size in enumerate(leaf.shape[:_DIMS]) if self.view.splits(size)]
        if not dims or dims[0] != 0:  # fewer samples than ranks
            return None
        kind = leaf.dim(), leaf.dtype, tuple(dims), module.training
        search = self._searches.setdefault(module, {}).setdefault(kind, _DimSearch())
        if not search.decided:
            return _PlainBatch(leaf, next(dim for dim in dims if dim not in search.costs), search)
        return None if search.dim is None else _PlainBatch(leaf, search.dim, search)


def _plain_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the plain tensors among arguments, and in tuples: lists and dicts may be kept or filled by a module."""
    for value in values:
        if _can_be_split(value):
            yield value
        elif type(value) is tuple:
            yield from _plain_in(value)


def _decide(search: _DimSearch, leaf: Tensor, view: View, out: Any) -> None:
    """Decide on a dimension if the cost of each is known, or one costs nothing."""
    dims = [dim for dim, size in enumerate(leaf.shape[:_DIMS]) if view.splits(size)]
    best = min(search.costs, key=lambda dim: search.costs[dim])
    if search.costs[best] and any(dim not in search.costs for dim in dims):
        return
    search.decided = True
    search.dim = None if search.costs[best] and not batches_in(out) else best


def _is_opaque(module: nn.Module) -> bool:
    """Return True if the torch functions of a call cannot be seen: TorchScript, `register_backward_hook`."""
    return isinstance(module, torch.jit.ScriptModule) or has_node_hooks(module)


def holds(leaf: Any, n: int, dim: int = 0) -> bool:
    """Return True if a plain input has n rows, and is not of shape (n, n), which is rather a mask of a sequence."""
    return _can_be_split(leaf) and leaf.shape[dim : dim + 1] == (n,) and leaf.shape != (n, n)


def _can_be_split(value: Any) -> bool:
    """Return True for a plain tensor whose rows can be gathered again: not a sparse, nested or quantized one."""
    return type(value) is Tensor and value.layout is torch.strided and not (value.is_nested or value.is_quantized)


def _versions(leaf: Tensor, batch: BatchTensor) -> list[int]:
    """Return the versions of a plain tensor and of the rows that were taken from it, which change with each write."""
    shares = zip(batch._shares, rows_by_share(batch), strict=True)
    return [version(leaf), *(share._spec.view.aliased.version(rows) for share, rows in shares)]


def _histories(batch: BatchTensor) -> list[Any]:
    """Return the autograd nodes of a batch's rows, which a write changes that autograd records."""
    return [share._rows.grad_fn for share in batch._shares]
