"""How each kind of module call is cut: found out once, remembered, and looked at again from time to time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from duoka.errors import Refused
from duoka.view.batch import BatchTensor, has_sparse
from duoka.view.call import Call, Writing, dimension_of, own_part
from duoka.view.cut import Cut
from duoka.view.learning import Learned, Learning, Unclear
from duoka.view.parts import has_batch_norm, has_hooks, holds_shards, is_compiled, is_scripted
from duoka.view.site import user_line
from duoka.view.twins import Twins
from duoka.view.view import View
from duoka.view.witness import Mixed, Raised

_DIMS = 3  # dimensions in which rows are looked for
ATTEMPTS = 8  # calls that may leave it unclear how a kind of call is cut


class How(Enum):
    """What is done with a kind of call that is not cut."""

    WHOLE = "whole"  # every rank computes all rows
    LATER = "later"  # whole this time; found out from another call


@dataclass(frozen=True, slots=True)
class Seam:
    """How a kind of call is cut.

    lead: the plain input, and its dimension, that is the batch where no input is a batch tensor. inputs: the
    dimension along which each input that is a plain tensor is cut. uncompiled: torch.compile is set aside.
    """

    lead: tuple[int, int] | None
    inputs: tuple[int | None, ...]
    learned: Learned
    uncompiled: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """A module whose children become boundaries.

    lead, inputs: as for a seam, the plain inputs that become batch tensors before; None: they stay as they are.
    """

    lead: tuple[int, int] | None = None
    inputs: tuple[int | None, ...] = ()


Found = Seam | Opened | How


@dataclass(slots=True)
class _Known:
    """What is known of a kind of call, and how often it was made."""

    seam: Found | None = None
    calls: int = 0


class Seams:
    """Finds out, and remembers, how calls are cut. All ranks ask for the same calls in the same order.

    view: of the last of a process's shares. looking: the context in which a module is run by a `Learning`.
    reaches_in: whether something of a module, of which this was learned, has to be intercepted inside of it, where
    compiled code cannot be.
    """

    def __init__(
        self,
        view: View,
        looking: Callable[[Learning], AbstractContextManager[None]],
        reaches_in: Callable[[nn.Module, Learned], bool],
    ) -> None:
        self._view, self._looking, self._reaches_in = view, looking, reaches_in
        self.twins = Twins(view.own.ranks)
        self._known: WeakKeyDictionary[nn.Module, dict[Any, _Known]] = WeakKeyDictionary()
        self._modes: WeakKeyDictionary[nn.Module, tuple[bool, ...]] = WeakKeyDictionary()
        self._parts: WeakSet[nn.Module] = WeakSet()  # of all modules met

    def modes_changed(self) -> None:
        """`train()` or `eval()` was called: parts of a module may be in other modes than before."""
        self._modes.clear()

    def _modes_of(self, module: nn.Module) -> tuple[bool, ...]:
        modes = self._modes.get(module)
        if modes is None:
            modes = self._modes[module] = tuple(part.training for part in module.modules())
        return modes

    def forget(self) -> None:
        """Find out anew: a hook was added, so modules may have to be opened."""
        self._known.clear()

    def given(self, module: nn.Module) -> None:
        """A module was given a parameter or a part: find out anew where it has been met."""
        if module in self._parts:
            self.forget()

    def of(self, call: Call) -> Found:
        """How to run this call.

        Raises:
            Refused: rows that were independent of each other no longer are.
        """
        kinds = self._known.get(call.module)
        if kinds is None:
            if any(map(is_lazy, call.module.parameters())):
                return How.LATER
            kinds = self._known[call.module] = {}
            self._adopt(call.module)
        known = kinds.setdefault((call.kind(), self._modes_of(call.module)), _Known())
        known.calls += 1
        if known.seam is None:
            found = self._find(call)
            if found is How.LATER:
                known.seam = How.WHOLE if known.calls == ATTEMPTS else None
                return How.LATER
            known.seam = found
        elif isinstance(known.seam, Seam) and not known.calls & (known.calls - 1):
            known.seam = _confirmed(known, self._find(call, again=True), call.module)
        return known.seam

    def _adopt(self, module: nn.Module) -> None:
        """A module met for the first time: the same parameters and buffers on all ranks from now on."""
        self._parts.update(module.modules())
        for parameter in module.parameters():
            self._view.adopt(parameter)
        for buffer in module.buffers():
            self._view.own.ranks.broadcast_into(buffer, 0)

    def _find(self, call: Call, again: bool = False) -> Found:
        """What the rank with the largest share finds out, for all ranks."""
        own = self._view.own
        reached = call.module.training or own.exact  # what it does asks nobody
        if any(map(_is_opaque, call.leaves)) or (reached and is_scripted(call.module)):
            return How.WHOLE
        if call.module not in self.twins and holds_shards(call.module):
            return self._around_shards(call.module)
        ranks = own.ranks
        self.twins.check(call.module)
        seen = self.twins.stand_in(call)
        told: Any = None
        found: Found
        if ranks.rank == ranks.world_size - 1:
            told = (Opened(), "it has hooks") if has_hooks(call.module) else self._look(seen.of_share(-1), again)
        found, reason = ranks.broadcast_object(told, ranks.world_size - 1)
        if call.module in self.twins:
            found = self._of_shards(call.module, found, reason)
        if own.exact:
            torch.clear_autocast_cache()  # as on the rank that has looked
        if isinstance(found, Opened):
            self._view.opened[type(call.module).__name__, user_line()] = reason
        if not isinstance(found, Seam) or not any(map(is_compiled, call.module.modules())):
            return found
        if not self._reaches_in(call.module, found.learned):
            return found
        why = "aliases stand for its parameters (--strategy exact)"
        if not own.exact:
            why = (
                "its BatchNorm or its random numbers are the whole batch's (--batch-norm local and --randomness "
                "worker keep it compiled)"
            )
        self._view.say(f"{type(call.module).__name__} at {user_line()} runs uncompiled: {why}")
        return replace(found, uncompiled=True)

    def _around_shards(self, module: nn.Module) -> Found:
        """A module that has a sharded model in it, or is a part of one."""
        if self.twins.is_part(module):
            raise Refused(
                f"{type(module).__name__} at {user_line()} is a part of a model of strategy='fsdp', whose parameters "
                "come together in calls of the model itself: call that, and let its forward choose the part"
            )
        return Opened()

    def _of_shards(self, module: nn.Module, found: Found, reason: str) -> Found:
        """A sharded model is cut, or computed whole by all ranks alike; torch's hooks must not meet batch tensors."""
        if isinstance(found, Seam) and found.learned.leaves:
            found, reason = Opened(), "it uses a tensor that needs a gradient, and is none of its parameters"
        if not isinstance(found, Opened):
            return found
        self._view.say(
            f"{type(module).__name__} at {user_line()} is computed whole by every rank, as {reason}; with "
            "strategy='fsdp' a model is shared out that gives an output for each sample (the loss outside of it)"
        )
        return How.WHOLE

    def _look(self, call: Call, again: bool) -> tuple[Found, str]:
        """Try what may be cut, until the values agree; if none does, why the first did not.

        again: it is known how, so what raises is the script's own error, to be raised by the call itself.
        """
        unclear, reason, opened = False, "", Opened()
        candidates = self._candidates(call)
        if self._view.own.exact and has_batch_norm(call.module):  # shares cannot meet inside of a boundary
            return Opened(*candidates[0]) if call.is_batch_first() else opened, "its BatchNorm adds up all shares"
        for lead, inputs in candidates:
            cut = call.cut(self._view, lead)
            if cut is None or cut.rows < 2:
                unclear = True
                continue
            places = zip(call.leaves, inputs, strict=True)
            of_rows = [isinstance(leaf, BatchTensor) or dim is not None for leaf, dim in places]

            def rows_of(start: int, stop: int, cut: Cut = cut, inputs: tuple[int | None, ...] = inputs) -> list[Any]:
                return call.rows(self._view, cut, inputs, (start, stop))

            try:
                return Seam(lead, inputs, self._tried(call, rows_of, of_rows, cut.rows)), ""
            except Mixed as mixed:
                unclear = unclear or (again and isinstance(mixed, Raised))
                if not reason and not isinstance(mixed, Writing) and call.is_batch_first():
                    opened = Opened(lead, inputs)
                reason = reason or str(mixed)
            except Unclear:
                unclear = True
        return How.LATER if unclear else opened, reason

    def _tried(self, call: Call, rows_of: Callable[[int, int], list[Any]], of_rows: list[bool], rows: int) -> Learned:
        """What runs with some of `rows` rows tell; rows_of(start, stop): the inputs with these."""
        learning = Learning(call.module, meets_nobody=self._view.own.exact)
        wants = [
            leaf.requires_grad and torch.is_grad_enabled() if isinstance(leaf, Tensor) else False
            for leaf in map(own_part, call.leaves)
        ]

        def given(row: Any, is_rows: bool, wants_grad: bool) -> Any:
            if not isinstance(row, Tensor) or isinstance(row, nn.Parameter):
                return row
            return learning.given(row, is_rows, wants_grad)

        def run(start: int, stop: int) -> Any:
            with torch.no_grad():
                leaves = rows_of(start, stop)
            return call.try_out(list(map(given, leaves, of_rows, wants)))

        self._view.ranks.alone = True
        try:
            with uncompiled(), unsaved(), self._looking(learning):
                return learning.learn(run, rows)
        finally:
            self._view.ranks.alone = False

    def meet(self, call: Call, rows: int) -> Learned | None:
        """How `rows` rows go through a part that is called for the first time inside of a boundary; None: they mix.

        What it is given are rows already, of which only the sizes tell where they are.
        """
        ranks, call = self._view.own.ranks, self.twins.stand_in(call)
        found: Learned | None = None
        if ranks.rank == ranks.world_size - 1:
            found = next(filter(None, (self._met(call, rows, dim) for dim in range(_DIMS))), None)
        return ranks.broadcast_object(found, ranks.world_size - 1)  # type: ignore[no-any-return]

    def _met(self, call: Call, rows: int, first: int) -> Learned | None:
        def dimension(leaf: Any) -> int | None:
            sizes = leaf.shape if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else ()
            fitting = [dim for dim, size in enumerate(sizes) if size == rows]
            return first if first in fitting else next(iter(fitting), None)

        dims = list(map(dimension, call.leaves))

        def rows_of(start: int, stop: int) -> list[Any]:
            return [
                leaf if dim is None else leaf.narrow(dim, start, stop - start)
                for leaf, dim in zip(call.leaves, dims, strict=True)
            ]

        try:
            return self._tried(call, rows_of, [dim is not None for dim in dims], rows) if rows > 1 else None
        except (Mixed, Unclear):
            return None

    def _candidates(self, call: Call) -> list[tuple[tuple[int, int] | None, tuple[int | None, ...]]]:
        """Which inputs may be cut where: all that have the batch's size, then none but the batch itself."""
        found = []
        for lead in call.leads or (None,):
            cut = call.cut(self._view, lead)
            n = cut.n if cut is not None else -1
            every = [dimension_of(leaf, n) for leaf in call.leaves]
            alone: list[int | None] = [None] * len(every)
            if lead is not None:
                every[lead[0]] = alone[lead[0]] = lead[1]
            found += [(lead, inputs) for inputs in dict.fromkeys((tuple(every), tuple(alone)))]
        return found


def uncompiled() -> AbstractContextManager[None]:
    """Compiled modules run as they were written: what is looked at, or opened, must not be traced."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def unsaved() -> AbstractContextManager[None]:
    """What a run saves for its backward pass is nobody's business: not a checkpoint's, around the call."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    # Detached: a graph that holds its own outputs is never freed.
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda saved: saved)


def _confirmed(known: _Known, found: Found, module: nn.Module) -> Found:
    """What is known, confirmed by a later look, with what that saw drawn for the first time."""
    before = known.seam
    assert isinstance(before, Seam)
    if found is How.LATER:
        return before
    if isinstance(found, Seam) and found.learned.outputs == before.learned.outputs:
        draws = {**found.learned.draws, **before.learned.draws}
        unmet = before.learned.unmet & found.learned.unmet
        reads = before.learned.reads | found.learned.reads
        # What the first call has left may have been what it had to prepare.
        traces = found.learned.traces or (before.learned.traces and known.calls > 2)
        return replace(before, learned=replace(before.learned, draws=draws, unmet=unmet, reads=reads, traces=traces))
    raise Refused(
        f"{type(module).__name__} at {user_line()} computed each sample by itself at first, but no longer does "
        f"(seen at its call {known.calls}), so its last results may be wrong; run this script on one device"
    )


def _is_opaque(leaf: Any) -> bool:
    """A sparse tensor, or an object that may hold tensors of its own (a key-value cache): computed by every rank."""
    if has_sparse(leaf):
        return True
    plain = (Tensor, nn.Module, Enum, type, torch.dtype, torch.device)
    return hasattr(leaf, "__dict__") and not isinstance(leaf, plain) and not callable(leaf)
