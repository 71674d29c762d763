"""Calls of compiled modules: compiled code gets this rank's rows, once these are proven to be independent.

The first call of a kind is made uncompiled, with batch tensors. If it involves no other rank's rows (no collective,
draw, or operation computed whole), does not use the batch size as a number and keeps no batch, then local rows give
the same results on the path that it took. Later calls run the compiled code on local rows.

Dynamo's guards ensure that compiled code takes the path for which it was compiled. So the result of a call on local
rows is used only if, on all ranks, it ran code that had been compiled before, in one graph. If it was compiled in
this call, the result is dropped and the call is made uncompiled, as the first one. If Dynamo compiles only parts of
it (graph breaks), or nothing (`set_stance("force_eager")`, its limit of recompilations), calls stay uncompiled.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from duoka.private.torch import (
    count_compilations,
    count_graph_breaks,
    is_compiled_call,
    is_compiler_imported,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from duoka.system.user_code import user_line
from duoka.view.generators import random_states, set_random_states
from duoka.view.shares.partition import Partition
from duoka.view.tensor.batch import Args, BatchTensor, Kwargs
from duoka.view.tensor.spec import Spec
from duoka.view.view import View

Original = Callable[..., Any]
_Outputs = tuple[list[Spec | None], Any]  # the placement of each output (None: not a batch), and their tree
_BREAKS = "torch.compile splits it at graph breaks, and does not guard what runs between its graphs"
_EAGER = "torch.compile does not compile it (its stance, its limit of recompilations, or a module without submodules)"
_KEEPS = "it stores a tensor of the batch"
_NO_REASON = ""
_ON_RANK = (_NO_REASON, _KEEPS, _BREAKS, _EAGER)  # reasons that only some ranks may see


class _NotProven(Exception):
    """The call has not run code that was compiled before."""


class ThreadState(threading.local):
    """State of the module call that a thread is running."""

    computes_whole = False  # in a call that is computed on all rows
    on_rows = False  # in a call of a compiled module with local rows
    leaves_out_padding = False  # in a call of an encoder's fast path
    around: Partition | None = None  # of the outermost module's batch
    outermost = True  # outside of calls with a batch

    def __init__(self) -> None:
        self.ordinary: dict[
            type, bool
        ] = {}  # classes whose modules, called with a batch, need nothing but their call


class Compiled:
    """The calls of compiled modules. here: the state of module calls."""

    def __init__(self, view: View, here: ThreadState) -> None:
        self._view, self._here = view, here
        self._kinds: WeakKeyDictionary[nn.Module, dict[Any, _Outputs | None]] = WeakKeyDictionary()
        self._failed: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # module -> _BREAKS or _EAGER

    def call(self, original: Original, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return `module(*args, **kwargs)`, compiled if that gives one device's numbers."""
        leaves, tree = tree_flatten((args, kwargs))
        batches = [leaf for leaf in leaves if isinstance(leaf, BatchTensor)]
        if not batches or self._view.shares.exact:
            return self._uncompiled(original, module, args, kwargs)
        kinds = self._kinds.setdefault(module, {})
        kind = tree, tuple(map(_kind, leaves)), torch.is_grad_enabled(), tuple(p.training for p in module.modules())
        if kind not in kinds:
            return self._prove(original, module, args, kwargs, kinds, kind)
        outputs = kinds[kind]
        if outputs is None:
            return self._uncompiled(original, module, args, kwargs)
        states = random_states()

        def on_rows() -> Any:
            local = [leaf._local if isinstance(leaf, BatchTensor) else leaf for leaf in leaves]
            rows, named = tree_unflatten(local, tree)
            return self._of_rows(self._compiled_before(original, module, rows, named), outputs)

        def again() -> Any:
            set_random_states(states)
            return self._prove(original, module, args, kwargs, kinds, kind)

        return self._view.shares.processes.run_or_fall_back(on_rows, again)

    def ran_eagerly(self, part: nn.Module) -> None:
        """Raise an error if a compiled module is being called with local rows; called by modules that run uncompiled.

        Raises:
            _NotProven: `part` runs uncompiled within that call.
        """
        if self._here.on_rows and not isinstance(part, GraphModule):  # the code that Dynamo made may be one
            raise _NotProven

    def _compiled_before(self, original: Original, module: nn.Module, rows: Any, named: Any) -> Any:
        """Call a compiled module with local rows.

        Raises:
            _NotProven: it was compiled in this call, or was not compiled at all.
        """
        if all(isinstance(part, GraphModule) for part in module.children()):  # no call would show that it ran eagerly
            self._failed[module] = _EAGER
            raise _NotProven
        compilations, breaks = count_compilations(), count_graph_breaks()
        here = self._here
        here.on_rows, here.ordinary, ordinary = True, {}, here.ordinary
        try:
            out = original(module, *rows, **named)
        except _NotProven:
            self._failed[module] = _EAGER
            raise
        finally:
            here.on_rows, here.ordinary = False, ordinary
        if count_graph_breaks() != breaks:
            self._failed[module] = _BREAKS
        if count_compilations() != compilations or module in self._failed:
            raise _NotProven
        return out

    def _prove(
        self,
        original: Original,
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
        kinds: dict[Any, _Outputs | None],
        kind: Any,
    ) -> Any:
        """Make the call uncompiled, and note whether local rows give the same results."""
        before = self._view.interactions
        with self._view.watching(SizeWatch()) as watch:
            leaves, structure = tree_flatten((args, kwargs))
            inputs = list(map(_again, leaves))
            inner_args, inner_kwargs = tree_unflatten(inputs, structure)
            out = self._uncompiled(original, module, inner_args, inner_kwargs)
            outputs, tree = tree_flatten(out)
            inner_args = inner_kwargs = out = None
            why = self._why_not(module, before, watch, inputs, outputs)
        kinds[kind] = None if why else ([_spec_of(leaf) for leaf in outputs], tree)
        if why:
            self._view.say(f"{type(module).__name__} at {user_line()} runs uncompiled, as {why}")
        return tree_unflatten(list(map(_again, outputs)), tree)

    def _why_not(
        self, module: nn.Module, before: int, watch: SizeWatch, inputs: list[Any], outputs: list[Any]
    ) -> str:
        """Return the reason why compiled code must not run on local rows; empty if it may."""
        view = self._view
        if view.interactions != before:
            return (
                "its BatchNorm, its random numbers or another operation needs all rows (--batch-norm local and "
                "--randomness worker keep these two compiled)"
            )
        if watch.used:
            return "it computes with the size of the batch"
        if any(isinstance(leaf, Tensor) and not isinstance(leaf, BatchTensor) for leaf in outputs):
            return "it returns a tensor that does not hold rows"
        keeps = _are_kept(view, [leaf for leaf in (*inputs, *outputs) if isinstance(leaf, BatchTensor)])
        number = _ON_RANK.index(self._failed.get(module, _KEEPS if keeps else _NO_REASON))
        return _ON_RANK[int(view.shares.processes.all_reduce(torch.tensor(number), ReduceOp.MAX))]

    def _uncompiled(self, original: Original, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        with uncompiled():
            return original(module, *args, **kwargs)

    @staticmethod
    def _of_rows(out: Any, outputs: _Outputs) -> Any:
        leaves, _ = tree_flatten(out)
        return tree_unflatten(
            [
                leaf if spec is None else BatchTensor(leaf, spec)
                for leaf, spec in zip(leaves, outputs[0], strict=True)
            ],
            outputs[1],
        )


def _are_kept(view: View, known: list[BatchTensor]) -> bool:
    """Return True if something refers to other batches than `known` that were made while the view was watched."""
    for table in (view.programs, view.calls, view.outcomes):
        table.clear()
    gc.collect()  # programs hold references
    metas = view.metas.everything()
    entries, of_known = Counter(map(id, metas)), Counter(id(batch._meta) for batch in known)
    nobodys = object()  # what Python's own references count, which differs between its versions
    metas.append(nobodys)
    counts = {id(meta): sys.getrefcount(meta) for meta in metas}
    beside = counts.pop(id(nobodys)) - 2  # the list and the variable
    # The list and the table refer to a meta once for each entry, and each batch does.
    return any(count > beside + 2 * entries[key] + of_known[key] for key, count in counts.items())


def _again(leaf: Any) -> Any:
    """Return a new batch with the same rows; anything else unchanged."""
    return BatchTensor(leaf._local, leaf._spec) if isinstance(leaf, BatchTensor) else leaf


def _spec_of(leaf: Any) -> Spec | None:
    return leaf._spec if isinstance(leaf, BatchTensor) else None


def is_compiled(part: nn.Module) -> bool:
    """Return True for a compiled module."""
    return type(part).__name__ == "OptimizedModule" or is_compiled_call(part)


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled modules uncompiled."""
    if not is_compiler_imported():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, BatchTensor):
        return leaf._meta
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str)) or leaf is None else type(leaf)


# Compiled code gets this rank's rows, and so their number as the batch's size. That is right if the size is used in
# `view`, `expand` or `zeros`, and nowhere else. While a call is checked, batch sizes are ints that report their use.

_TRUSTED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_AS_SIZES = frozenset(
    {"view", "reshape", "unflatten", "expand", "broadcast_to", "repeat", "tile", "zeros", "ones", "full", "empty"}
    | {"new_zeros", "new_ones", "new_full", "new_empty"}
)
_AS_NUMBERS = frozenset({"__len__", "numel", "nelement", "nbytes"})
_OPERATORS = """
__add__ __radd__ __sub__ __rsub__ __truediv__ __rtruediv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__
__abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __bool__ __int__ __float__ __index__ __hash__ __str__ __repr__
__format__ __divmod__ __rdivmod__ __round__ __and__ __or__ __xor__ __lshift__ __rshift__ __invert__
"""


class BatchSize(int):
    """An int that sets `watch.used` if code other than torch's and duoka's uses it as a number."""

    watch: SizeWatch

    @staticmethod
    def of(value: int, watch: SizeWatch) -> BatchSize:
        """Create a BatchSize for the size of a batch, or for a multiple of it."""
        size = BatchSize(value)
        size.watch = watch
        return size

    def __mul__(self, other: Any) -> Any:
        product = int.__mul__(self, other)
        return product if product is NotImplemented else BatchSize.of(product, self.watch)

    __rmul__ = __mul__


def _telling(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def operator(self: BatchSize, *args: Any) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(_TRUSTED):
            self.watch.used = True
        return plain(self, *args)

    return operator


for _name in _OPERATORS.split():
    setattr(BatchSize, _name, _telling(_name))


class SizeWatch(TorchFunctionMode):
    """A context that sets `used` if a batch size is used as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def size(self, shape: list[int], dim: int) -> torch.Size:
        """Return the shape of a batch with its samples in dimension `dim`."""
        return torch.Size([BatchSize.of(size, self) if at == dim else size for at, size in enumerate(shape)])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _AS_NUMBERS or (
            name not in _AS_SIZES and any(type(leaf) is BatchSize for leaf in tree_leaves((args, kwargs)))
        ):
            self.used = True
        return func(*args, **kwargs)
