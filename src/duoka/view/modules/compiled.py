"""Compiled modules: their code knows nothing of batches, so it gets this rank's rows, once that is proven right.

The first call of a kind is made uncompiled, with batch tensors. If nothing in it met the other ranks, drew random
numbers, was computed whole, used the batch's size as a number or kept a batch, local rows give the same on the path
that it took, and the specs of its outputs are known; later calls run the compiled code on these. Dynamo guards that
path: where it compiles anew during such a call, on any rank, another path may have been taken, so what came of it
is dropped, and the call is made uncompiled again.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from duoka.private.torch import count_compilations, is_compiler_imported, tree_flatten, tree_unflatten
from duoka.view.random.generators import random_states, set_random_states
from duoka.view.support.sizes import SizeWatch, watched
from duoka.view.support.user_code import user_line
from duoka.view.tensor.batch import BatchTensor, Spec
from duoka.view.view import View

Original = Callable[..., Any]
_Outputs = tuple[list[Spec | None], Any]  # the spec of each output, None for what is no batch, and their tree


class _CompiledAnew(Exception):
    """The code took a path that was not proven."""


class Compiled:
    """The calls of compiled modules."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._kinds: WeakKeyDictionary[nn.Module, dict[Any, _Outputs | None]] = WeakKeyDictionary()

    def call(self, original: Original, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`module(*args, **kwargs)`, compiled where that gives one device's numbers."""
        leaves, tree = tree_flatten((args, kwargs))
        batches = [leaf for leaf in leaves if isinstance(leaf, BatchTensor)]
        if not batches or self._view.shares.exact:
            return self._uncompiled(original, module, args, kwargs)
        kinds = self._kinds.setdefault(module, {})
        kind = tree, tuple(map(_kind, leaves)), torch.is_grad_enabled(), tuple(p.training for p in module.modules())
        if kind not in kinds:
            return self._proven(original, module, args, kwargs, kinds, kind)
        outputs = kinds[kind]
        if outputs is None:
            return self._uncompiled(original, module, args, kwargs)
        states, compiled = random_states(), _compilations()

        def of_rows() -> Any:
            rows, named = tree_unflatten(
                [leaf._local if isinstance(leaf, BatchTensor) else leaf for leaf in leaves], tree
            )
            out = original(module, *rows, **named)
            if _compilations() != compiled:
                raise _CompiledAnew
            return self._of_rows(out, outputs)

        def anew() -> Any:
            set_random_states(states)
            return self._proven(original, module, args, kwargs, kinds, kind)

        return self._view.shares.ranks.agreed(of_rows, anew)

    def _proven(
        self,
        original: Original,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kinds: dict[Any, _Outputs | None],
        kind: Any,
    ) -> Any:
        """The call, uncompiled; from now on it is known whether rows alone give the same."""
        met = self._view.interactions
        with watched(self._view) as watch:
            leaves, given = tree_flatten((args, kwargs))
            inputs = [
                BatchTensor(leaf._local, leaf._spec) if isinstance(leaf, BatchTensor) else leaf for leaf in leaves
            ]
            inner_args, inner_kwargs = tree_unflatten(inputs, given)
            out = self._uncompiled(original, module, inner_args, inner_kwargs)
            outputs, tree = tree_flatten(out)
            inner_args = inner_kwargs = out = None
            why = self._why_not(met, watch, inputs, outputs)
        kinds[kind] = None if why else ([_spec_of(leaf) for leaf in outputs], tree)
        if why:
            self._view.say(f"{type(module).__name__} at {user_line()} runs uncompiled, as {why}")
        return tree_unflatten(list(map(_again, outputs)), tree)

    def _on_any(self, flag: bool) -> bool:
        """Whether it is so on any rank: all have to go on alike."""
        return bool(self._view.shares.ranks.all_reduce(torch.tensor(int(flag)), ReduceOp.MAX))

    def _why_not(self, met: int, watch: SizeWatch, inputs: list[Any], outputs: list[Any]) -> str:
        """Why rows alone would not give what a call with batches gave; empty where they do."""
        view = self._view
        if view.interactions != met:
            return (
                "its BatchNorm, its random numbers or something else in it are the whole batch's (--batch-norm local "
                "and --randomness worker keep these two compiled)"
            )
        if watch.used:
            return "it computes with the size of the batch"
        if any(isinstance(leaf, Tensor) and not isinstance(leaf, BatchTensor) for leaf in outputs):
            return "it gives a tensor that is not of rows"
        view.programs.clear()
        view.calls.clear()
        gc.collect()  # programs are held by what they hold
        known = Counter(id(leaf._meta) for leaf in (*inputs, *outputs) if isinstance(leaf, BatchTensor))
        # Besides each batch there hold a meta: the table, the list, this loop, and the call.
        kept = any(sys.getrefcount(meta) > 4 + known[id(meta)] for meta in view.metas.everything())
        if self._on_any(kept):
            return "it keeps something of the batch"
        return ""

    def _uncompiled(
        self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
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


def _again(leaf: Any) -> Any:
    """The same batch as a new one; anything else as it is."""
    return BatchTensor(leaf._local, leaf._spec) if isinstance(leaf, BatchTensor) else leaf


def _spec_of(leaf: Any) -> Spec | None:
    return leaf._spec if isinstance(leaf, BatchTensor) else None


def uncompiled() -> AbstractContextManager[None]:
    """Compiled modules run as they were written."""
    if not is_compiler_imported():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, BatchTensor):
        return leaf._meta
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str)) or leaf is None else type(leaf)


def _compilations() -> int:
    """How many graphs Dynamo has compiled."""
    return count_compilations() if is_compiler_imported() else 0
