"""The boundary: the outermost call of a module with parameters, where a batch becomes this rank's rows.

Local rows go in, batch tensors come out. How a kind of call is cut is learned once (`learning.py`). A module
whose rows mix, or whose outputs have no batch (a model that returns its loss), is opened: its children become
boundaries, and what stands between them follows the rules.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from duoka.errors import Refused
from duoka.view.batch import BatchTensor, Spec
from duoka.view.cut import Cut
from duoka.view.draws import OwnStream, SeededMode, draw_own_rows, shape_drawn
from duoka.view.learning import Learned, Learning, Mixed, Place, Unclear
from duoka.view.site import user_line
from duoka.view.view import View

Original = Callable[..., Any]


class How(Enum):
    """What is done with a kind of call that is not cut."""

    OPEN = "opened"  # its children become boundaries
    WHOLE = "whole"  # every rank computes all rows
    LATER = "later"  # whole this time; learned from another call


@dataclass(frozen=True, slots=True)
class Seam:
    """How a kind of call is cut.

    lead: the plain input, and its dimension, that is the batch where no input is a batch tensor. inputs: the
    dimension along which each input that is a plain tensor is cut.
    """

    lead: tuple[int, int] | None
    inputs: tuple[int | None, ...]
    learned: Learned


@dataclass(slots=True)
class _Drawer:
    """A part of a module that draws: for which batch, and where the batch is in each of its draws."""

    name: str
    cut: Cut
    places: tuple[Place | None, ...]
    count: int = 0


@dataclass(slots=True)
class _Inside:
    """A boundary call that is going on."""

    cut: Cut | None = None  # None: every rank computes the whole batch
    drawers: Mapping[nn.Module, _Drawer] | None = None
    drawing: list[_Drawer] = field(default_factory=list)  # whose forward is running, the innermost last
    learning: Learning | None = None
    recomputing: bool = False


class Boundary:
    """Decides, for every module call of the script, whether rows become local there.

    own_stream: where this rank draws from inside of boundaries, if not from one stream with the others.
    """

    def __init__(self, view: View, own_stream: OwnStream | None = None) -> None:
        self.view = view
        self.inside: _Inside | None = None
        self._own_stream = own_stream
        self._seams: WeakKeyDictionary[nn.Module, dict[Any, Seam | How]] = WeakKeyDictionary()
        self._drawers: WeakKeyDictionary[nn.Module, _Drawer] = WeakKeyDictionary()
        self._thread = threading.get_ident()
        self._mode = SeededMode(self._draw)

    def forget(self) -> None:
        """Learn anew: a hook was added, so modules may have to be opened."""
        self._seams.clear()

    def call(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)` as the script wrote it; `original` is torch's own call."""
        inside = self.inside
        if inside is not None:
            if inside.drawers is None and inside.learning is None:
                return original(module, *args, **kwargs)
            return self._part(inside, original, module, args, kwargs)
        if threading.get_ident() != self._thread or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        batch = next((leaf for leaf in leaves if isinstance(leaf, BatchTensor)), None)
        if batch is None and not any(self._may_lead(leaf) for leaf in leaves):
            return original(module, *args, **kwargs)
        seam = self._seam(original, module, leaves, tree, batch)
        if seam is How.OPEN:
            with _uncompiled():
                return original(module, *args, **kwargs)
        if isinstance(seam, How):
            return self._whole(original, module, leaves, tree)
        return self._cut(original, module, leaves, tree, batch, seam)

    def _may_lead(self, leaf: Any) -> bool:
        """Whether a plain tensor could be a batch cut by hand."""
        return isinstance(leaf, Tensor) and any(self.view.shares(size) for size in leaf.shape[:2])

    # --- the three ways to run a call

    def _cut(
        self,
        original: Original,
        module: nn.Module,
        leaves: list[Any],
        tree: TreeSpec,
        batch: BatchTensor | None,
        seam: Seam,
    ) -> Any:
        cut = self._cut_of(leaves, batch, seam.lead)
        if cut is None:
            return original(module, *tree_unflatten(leaves, tree)[0], **tree_unflatten(leaves, tree)[1])
        rows = [self._own(leaf, dim, cut) for leaf, dim in zip(leaves, seam.inputs, strict=True)]
        args, kwargs = tree_unflatten(rows, tree)
        inside = _Inside(cut)
        with _during(self, inside):
            if not seam.learned.draws:
                out = original(module, *args, **kwargs)
            elif self._own_stream is not None:
                with self._own_stream:
                    out = original(module, *args, **kwargs)
            else:
                inside.drawers = self._drawers_in(module, seam.learned.draws, cut)
                out = self._part(inside, original, module, args, kwargs)
        return self._wrapped(out, seam.learned.outputs, cut)

    def _drawers_in(
        self, module: nn.Module, draws: dict[str, tuple[Place | None, ...]], cut: Cut
    ) -> dict[nn.Module, _Drawer]:
        drawers = {module.get_submodule(name): _Drawer(name, cut, places) for name, places in draws.items()}
        self._drawers.update(drawers)
        return drawers

    def _whole(self, original: Original, module: nn.Module, leaves: list[Any], tree: TreeSpec) -> Any:
        whole = [leaf.full_tensor() if isinstance(leaf, BatchTensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(whole, tree)
        self.view.gathered[type(module).__name__, user_line()] += 1
        with _during(self, _Inside()):
            return original(module, *args, **kwargs)

    def _part(self, inside: _Inside, original: Original, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call inside of a boundary in which something is drawn, or learned."""
        if inside.learning is not None:
            return inside.learning.call(original, module, args, kwargs)
        drawer = None if inside.drawers is None else inside.drawers.get(module)
        if drawer is None:
            return original(module, *args, **kwargs)
        inside.drawing.append(drawer)
        try:
            if len(inside.drawing) > 1:
                return original(module, *args, **kwargs)
            with self._mode:
                return original(module, *args, **kwargs)
        finally:
            inside.drawing.pop()

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A random operator inside of a boundary."""
        assert self.inside is not None
        drawer = self.inside.drawing[-1]
        count = drawer.count % len(drawer.places) if self.inside.recomputing else drawer.count
        drawer.count += 1
        if count >= len(drawer.places):
            raise Refused(
                f"{drawer.name or 'the model'} draws more random numbers than in its first call ({user_line()})"
            )
        place = drawer.places[count]
        if place is None:
            return func(*args, **kwargs)
        spec = self._spec(place, shape_drawn(args, kwargs), drawer.cut)
        return draw_own_rows(func, args, kwargs, spec, place.order)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """During a backward pass: a module called now computes an activation anew, for the rows it was given."""
        before, self.inside = self.inside, _Inside(drawers=self._drawers, recomputing=True)
        for drawer in self._drawers.values():
            drawer.count = 0
        try:
            yield
        finally:
            self.inside = before

    # --- finding out

    def _seam(
        self,
        original: Original,
        module: nn.Module,
        leaves: list[Any],
        tree: TreeSpec,
        batch: BatchTensor | None,
    ) -> Seam | How:
        seams = self._seams.get(module)
        if seams is None:
            seams = self._seams[module] = {}
            self._adopt(module)
        kind = (module.training, tree, tuple(map(_kind, leaves)))
        seam = seams.get(kind)
        if seam is None:
            seam = self._find(original, module, leaves, tree, batch)
            if seam is not How.LATER:
                seams[kind] = seam
        return seam

    def _adopt(self, module: nn.Module) -> None:
        """A module met for the first time: the same parameters and buffers on all ranks from now on."""
        for parameter in module.parameters():
            self.view.adopt(parameter)
        for buffer in module.buffers():
            self.view.ranks.broadcast_into(buffer, 0)

    def _find(
        self,
        original: Original,
        module: nn.Module,
        leaves: list[Any],
        tree: TreeSpec,
        batch: BatchTensor | None,
    ) -> Seam | How:
        """What the rank with the largest share finds out, for all ranks."""
        if any(_is_opaque(leaf) for leaf in leaves):
            return How.WHOLE
        if any(is_lazy(p) for p in module.parameters()) or any(map(_twice, leaves, [batch] * len(leaves))):
            return How.LATER
        ranks = self.view.ranks
        found: Seam | How | None = None
        if ranks.rank == ranks.world_size - 1:
            found = How.OPEN if _has_hooks(module) else self._look(original, module, leaves, tree, batch)
        found = ranks.broadcast_object(found, ranks.world_size - 1)
        if isinstance(found, Seam) and found.learned.draws and any(map(_is_compiled, module.modules())):
            self.view.say(
                f"{type(module).__name__} at {user_line()} is compiled and draws random numbers: it runs uncompiled, "
                "with the draws that it has without torch.compile (--randomness worker keeps it compiled)"
            )
        return found

    def _look(
        self,
        original: Original,
        module: nn.Module,
        leaves: list[Any],
        tree: TreeSpec,
        batch: BatchTensor | None,
    ) -> Seam | How:
        unclear = False
        for lead, inputs in self._candidates(leaves, batch):
            cut = self._cut_of(leaves, batch, lead)
            if cut is None or cut.rows < 2:
                unclear = True
                continue

            def run(start: int, stop: int, cut: Cut = cut, inputs: tuple[int | None, ...] = inputs) -> Any:
                rows = [self._own(leaf, dim, cut, (start, stop)) for leaf, dim in zip(leaves, inputs, strict=True)]
                args, kwargs = tree_unflatten(rows, tree)
                return original(module, *args, **kwargs)

            learning = Learning(module)
            self.view.ranks.alone = True
            try:
                with _uncompiled(), _during(self, _Inside(learning=learning)):
                    return Seam(lead, inputs, learning.learn(run, cut.rows))
            except Mixed:
                continue
            except Unclear:
                unclear = True
            finally:
                self.view.ranks.alone = False
        return How.LATER if unclear else How.OPEN

    def _candidates(
        self, leaves: list[Any], batch: BatchTensor | None
    ) -> list[tuple[tuple[int, int] | None, tuple[int | None, ...]]]:
        """Which inputs may be cut where: all that have the batch's size, then none but the batch itself."""
        leads: list[tuple[int, int] | None] = [None]
        if batch is None:
            first = next(index for index, leaf in enumerate(leaves) if self._may_lead(leaf))
            leads = [(first, dim) for dim, size in enumerate(leaves[first].shape[:2]) if self.view.shares(size)]
        found = []
        for lead in leads:
            n = batch._spec.cut.n if batch is not None else leaves[lead[0]].shape[lead[1]]  # type: ignore[index]
            cut_all = tuple(_dimension(leaf, n) for leaf in leaves)
            if lead is not None:
                cut_all = (*cut_all[: lead[0]], lead[1], *cut_all[lead[0] + 1 :])
            alone = tuple(dim if lead is not None and index == lead[0] else None for index, dim in enumerate(cut_all))
            found += [(lead, inputs) for inputs in dict.fromkeys((cut_all, alone))]
        return found

    # --- rows

    def _cut_of(self, leaves: list[Any], batch: BatchTensor | None, lead: tuple[int, int] | None) -> Cut | None:
        """The cut of this call; None for a batch too small to share out."""
        if batch is not None:
            return batch._spec.cut
        assert lead is not None
        n = leaves[lead[0]].shape[lead[1]]
        return self.view.cut(n) if self.view.shares(n) else None

    def _own(self, leaf: Any, dim: int | None, cut: Cut, part: tuple[int, int] | None = None) -> Any:
        """This rank's rows of an input, or the `part` of them."""
        if isinstance(leaf, BatchTensor):
            if leaf._spec.cut is not cut:
                return leaf.full_tensor()
            rows, spec = leaf._local, leaf._spec
        elif dim is not None and leaf.shape[dim] == cut.n:
            spec = Spec(self.view, cut, dim)
            rows = spec.own(leaf)
        else:
            return leaf
        if part is None:
            return rows
        start, stop = part
        if spec.outer == 1:
            return rows.narrow(spec.dim, start * spec.inner, (stop - start) * spec.inner)
        apart = rows.unflatten(spec.dim, (spec.outer, cut.rows, spec.inner)).narrow(spec.dim + 1, start, stop - start)
        return apart.flatten(spec.dim, spec.dim + 2)

    def _spec(self, place: Place, shape: tuple[int, ...], cut: Cut) -> Spec:
        each, rest = divmod(shape[place.dim], cut.rows)
        if rest:
            raise Refused(
                f"a random draw of shape {shape} does not hold {cut.rows} rows as in the first call ({user_line()})"
            )
        return Spec(self.view, cut, place.dim, each if place.outer else 1, 1 if place.outer else each)

    def _wrapped(self, out: Any, places: tuple[Place | None, ...], cut: Cut) -> Any:
        if isinstance(out, Tensor) and len(places) == 1 and places[0] is not None:
            return BatchTensor(out, self._spec(places[0], tuple(out.shape), cut))
        leaves, tree = tree_flatten(out)
        if len(leaves) != len(places):
            raise Refused(
                f"the model gave {len(leaves)} outputs, but {len(places)} in its first call ({user_line()})"
            )
        wrapped = [
            BatchTensor(leaf, self._spec(place, tuple(leaf.shape), cut)) if place is not None else leaf
            for leaf, place in zip(leaves, places, strict=True)
        ]
        return tree_unflatten(wrapped, tree)


class _during:
    """The boundary is inside of a call meanwhile."""

    __slots__ = ("boundary", "inside")

    def __init__(self, boundary: Boundary, inside: _Inside) -> None:
        self.boundary, self.inside = boundary, inside

    def __enter__(self) -> None:
        self.boundary.inside = self.inside

    def __exit__(self, *error: object) -> None:
        self.boundary.inside = None


def _is_compiled(part: nn.Module) -> bool:
    return type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None


def _uncompiled() -> AbstractContextManager[None]:
    """Compiled modules run as they were written: what is looked at, or opened, must not be traced."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def _kind(leaf: Any) -> Any:
    """What of an input decides how a call is cut."""
    if isinstance(leaf, Tensor):
        return (
            type(leaf),
            leaf.dim(),
            leaf.dtype,
            (leaf._spec.dim, leaf._spec.outer > 1) if isinstance(leaf, BatchTensor) else None,
        )
    return type(leaf)


def _dimension(leaf: Any, n: int) -> int | None:
    if not isinstance(leaf, Tensor) or isinstance(leaf, (BatchTensor, nn.Parameter)):
        return None
    return next((dim for dim, size in enumerate(leaf.shape) if size == n), None)


def _twice(leaf: Any, batch: BatchTensor | None) -> bool:
    """A plain input with two dimensions of the batch's size: chance, so another call is learned from."""
    if batch is None or not isinstance(leaf, Tensor) or isinstance(leaf, BatchTensor):
        return False
    return sum(size == batch._spec.cut.n for size in leaf.shape) > 1


def _is_opaque(leaf: Any) -> bool:
    """An object that may hold tensors of its own (a key-value cache): not cut, computed by every rank."""
    plain = (Tensor, nn.Module, Enum, type, torch.dtype, torch.device)
    return hasattr(leaf, "__dict__") and not isinstance(leaf, plain) and not callable(leaf)


def _has_hooks(module: nn.Module) -> bool:
    """Hooks of the script's own, in the module or its parts: they must see batches, not rows."""
    everywhere = nn.modules.module
    if everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks or everywhere._global_backward_hooks:
        return True
    return any(
        not getattr(hook, "__module__", "").startswith("torch.")
        for part in module.modules()
        for hooks in (
            part._forward_hooks,
            part._forward_pre_hooks,
            part._backward_hooks,
            part._backward_pre_hooks,
        )
        for hook in hooks.values()
    )
