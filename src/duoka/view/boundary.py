"""The boundary: the outermost call of a module with parameters, where a batch becomes this rank's rows.

Local rows go in, batch tensors come out. How a kind of call is cut is found out once (`seams.py`). A module whose
rows mix, or whose outputs have no batch (a model that returns its loss), is opened: its children become boundaries,
and what stands between them follows the rules.
"""

from __future__ import annotations

import io
import pickle
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from duoka.errors import Refused
from duoka.private.torch import AnyBatchNorm as _BatchNorm
from duoka.private.torch import tree_flatten, tree_unflatten
from duoka.private.torch import without_dispatch_modes as _disable_current_modes
from duoka.view.aliases import Aliases
from duoka.view.batch import BatchTensor, Spec, alike, joined, of_the_whole
from duoka.view.call import Call, leads_in
from duoka.view.contents import Contents
from duoka.view.cut import Cut
from duoka.view.draws import (
    Once,
    OwnStream,
    SeededMode,
    draw_own_rows,
    random_digest,
    random_states,
    set_random_states,
    shape_drawn,
)
from duoka.view.learning import Learned, Learning, Place, spec_at
from duoka.view.lent import same_memory
from duoka.view.recomputing import on_rows
from duoka.view.repeating import Repeating
from duoka.view.seams import Opened, Seam, Seams, uncompiled
from duoka.view.site import calling_line, user_line
from duoka.view.traceless import traceless
from duoka.view.view import View
from duoka.view.witness import graph

Original = Callable[..., Any]
REMEMBERED = 8192  # draws that a backward pass can repeat


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
    view: View | None = None  # of the share that is computed
    drawers: dict[nn.Module, _Drawer] | None = None
    unmet: dict[nn.Module, str] = field(default_factory=dict)  # parts that were not called when this was learned
    learned: Learned | None = None
    drawing: list[_Drawer] = field(default_factory=list)  # whose forward is running, the innermost last
    learning: Learning | None = None
    recomputing: bool = False
    redrawing: bool = False
    reading: bool = False


class Boundary:
    """Decides, for every module call of the script, whether rows become local there.

    own_stream: where this rank draws from inside of boundaries, if not from one stream with the others.
    whole_norm: BatchNorm inside of boundaries is the whole batch's.
    """

    def __init__(self, view: View, own_stream: OwnStream | None = None, whole_norm: bool = True) -> None:
        self.view = view
        self.inside: _Inside | None = None
        self.seams = Seams(view, lambda learning: self._during(_Inside(learning=learning)), self._reaches_in)
        self._own_stream, self._whole_norm = own_stream, whole_norm
        self._drawn: dict[int, tuple[Place | None, Cut]] = {}  # random state -> what was drawn from there
        self._once: Once | None = None  # while a call is made for several shares
        self._thread = threading.get_ident()
        self._around: int | None = None  # the size of the batch that an opened module was given
        self.open_all = False  # no module is a boundary meanwhile
        self._mode = SeededMode(self._draw)

    def call(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)` as the script wrote it; `original` is torch's own call."""
        inside = self.inside
        if self.open_all:
            return original(module, *args, **kwargs)
        if inside is not None:
            if inside.drawers is None and inside.learning is None and not inside.recomputing:
                return original(module, *args, **kwargs)
            return self._part(inside, original, module, args, kwargs)
        if threading.get_ident() != self._thread or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        batch = next((leaf for leaf in leaves if isinstance(leaf, BatchTensor)), None)
        leads = () if batch is not None else leads_in(self.view, leaves, self._around)
        if batch is None and not leads:
            return original(module, *args, **kwargs)
        call = Call(original, module, leaves, tree, batch, leads)
        found = self.seams.of(call)
        if isinstance(found, Seam):
            return self._cut(call, found)
        if isinstance(found, Opened):
            return self._open(call, found, args, kwargs)
        return self._whole(call)

    # --- the ways to run a call

    def _cut(self, call: Call, seam: Seam) -> Any:
        if call.cut(self.view, seam.lead) is None:
            return call.run(call.leaves)
        own = self.view.own
        calls = [call.of_share(place) for place in range(own.count)]
        cuts = [one.cut(view, seam.lead) for one, view in zip(calls, own.views, strict=True)]
        rows = own.each(lambda place: calls[place].rows(own.views[place], cuts[place], seam.inputs))  # type: ignore[arg-type]
        if own.exact and torch.is_grad_enabled() and not seam.learned.followed:
            self._follow(calls[-1], seam, rows[-1], self.view)
        if own.count == 1:
            return self._share(call, seam, rows[0], self.view)
        repeating = Repeating(call.module, seam.learned.traces)
        found, self._once = [], Once()
        try:
            for place in reversed(range(own.count)):  # the last, a large one, finds out what is not known yet
                with repeating.rehearsal() if place else repeating.last():
                    found.append(self._share(calls[place], seam, rows[place], own.views[place]))
        finally:
            self._once = None
        return joined(found[::-1])

    def _share(self, call: Call, seam: Seam, rows: list[Any], view: View) -> Any:
        """The call with one share's rows."""
        states = random_states() if seam.learned.leaves and view.own.exact else None
        out = self._of_rows(call, seam, rows, view)
        if seam.learned.leaves:
            unknown = self._leaves_of(out, call, rows, view)
            for leaf in unknown:
                view.adopt(leaf)
            if unknown and states is not None:  # and again, with an alias in the place of each
                self._check_again(call, seam)
                set_random_states(states)
                out = self._of_rows(call, seam, rows, view)
        cut = call.cut(view, seam.lead)
        assert cut is not None
        return self._wrapped(out, seam.learned.outputs, cut, view)

    def _of_rows(self, call: Call, seam: Seam, rows: list[Any], view: View) -> Any:
        cut, draws = call.cut(view, seam.lead), seam.learned.draws
        inside = _Inside(cut, view, learned=seam.learned)
        with ExitStack() as around:
            around.enter_context(self._during(inside))
            around.enter_context(self._raising_as_whole(call))
            if seam.uncompiled:
                around.enter_context(uncompiled())
            if view.own.exact and torch.is_grad_enabled():
                around.enter_context(Aliases(view.alias))
            if not draws and not seam.learned.unmet:
                before = torch.get_rng_state()
                out = call.run(rows)
                if self._own_stream is None and not torch.equal(before, torch.get_rng_state()):
                    raise Refused(
                        f"{type(call.module).__name__} at {user_line()} draws random numbers, as it did not in its "
                        "first call; --randomness worker lets each rank draw its own"
                    )
            elif self._own_stream is not None:
                with self._own_stream:
                    out = call.run(rows)
            else:
                assert cut is not None
                inside.drawers = _drawers_in(call.module, draws, cut)
                inside.unmet = {call.module.get_submodule(name): name for name in seam.learned.unmet}
                args, kwargs = tree_unflatten(rows, call.tree)
                out = self._part(inside, call.original, call.module, args, kwargs)
        return out

    @contextmanager
    def _raising_as_whole(self, call: Call) -> Iterator[None]:
        """What the model raises names the shapes of a whole batch."""

        def again() -> None:
            leaves = [alike(leaf) if isinstance(leaf, BatchTensor) else leaf for leaf in call.leaves]
            with traceless(call.module), self.computed_whole(), redirect_stdout(io.StringIO()):
                call.run(leaves)

        try:
            yield
        except Exception as error:
            if call.module in self.seams.twins:  # no rank can run it alone
                raise self.seams.twins.in_other_words(error) from None
            raise of_the_whole(error, self.view, again) from None

    def read(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A tensor is read into Python: inside of a boundary it must be what it is on every rank.

        Raises:
            Refused: it is not, on a line that did not read when the module was learned.
        """
        found = method(*args, **kwargs)
        inside, line = self.inside, None
        if inside is not None and inside.learned is not None and not inside.reading:
            line = calling_line()
        if line is None or inside is None or inside.learned is None or line in inside.learned.reads:
            return found
        inside.reading = True
        try:
            mine = zlib.crc32(pickle.dumps(found))
            differs = mine != self.view.own.ranks.broadcast_object(mine, 0)
        finally:
            inside.reading = False
        if differs:
            raise Refused(f"the model reads a value of its rows at {line}, as it did not in its first calls")
        return found

    def longest(self, mine: int) -> int:
        """How long sequences are padded inside of a boundary: as the longest of the batch, whosever row that is."""
        inside = self.inside
        if inside is None:
            return mine
        if inside.learning is not None:
            return inside.learning.longest(mine)
        if inside.cut is None or inside.learned is None:
            return mine
        return int(self.view.own.ranks.all_reduce(torch.tensor(mine), ReduceOp.MAX).item())

    def _follow(self, call: Call, seam: Seam, rows: list[Any], view: View) -> None:
        """A first look at what the graph of a call leads to, so that aliases stand for all of it."""
        with Repeating(call.module, traces=True).rehearsal():
            out = self._of_rows(call, seam, rows, view)
            for leaf in self._leaves_of(out, call, rows, view):
                if seam.learned.leaves:  # else the call has made it
                    view.adopt(leaf)
        seam.learned.followed = True

    def _leaves_of(self, out: Any, call: Call, rows: list[Any], view: View) -> list[Tensor]:
        """Tensors that need gradients and came in by attributes or closures: to be kept in step like parameters.

        Raises:
            Refused: one has an alias, and was used past it.
        """
        unknown = []
        asking = [row for row in rows if isinstance(row, Tensor) and row.requires_grad]
        ends = [torch.autograd.graph.get_gradient_edge(row).node for row in asking]
        for node in graph(Contents(out).leaves, ends):
            leaf = getattr(node, "variable", None)
            if not isinstance(leaf, Tensor) or (view.own.exact and view.own.is_alias(leaf)):
                continue
            if any(isinstance(row, Tensor) and same_memory(row, leaf) for row in rows):
                continue  # rows that ask for a gradient of their own
            if view.alias(leaf) is not leaf:
                raise Refused(
                    f"{type(call.module).__name__} at {user_line()} uses a tensor of shape {tuple(leaf.shape)} that "
                    "needs a gradient in a way that duoka does not see; --strategy exact cannot add up its gradient"
                )
            unknown.append(leaf)
        return unknown

    @staticmethod
    def _check_again(call: Call, seam: Seam) -> None:
        if seam.learned.traces:
            raise Refused(
                f"{type(call.module).__name__} at {user_line()} uses a new tensor that needs a gradient, and leaves "
                "traces, so --strategy exact cannot call it again; let an optimizer have the tensor"
            )

    def _open(self, call: Call, opened: Opened, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batches = call.batches(self.view, opened.lead, opened.inputs)
        first = call.batch if batches is None else batches[opened.lead[0]]  # type: ignore[index]
        before, self._around = self._around, None if first is None else first._spec.cut.n
        try:
            with uncompiled():
                return call.original(call.module, *args, **kwargs) if batches is None else call.run(batches)
        finally:
            self._around = before

    def _whole(self, call: Call) -> Any:
        """Every rank computes all rows."""
        with self.view.gathered.timed(type(call.module).__name__), self.computed_whole():
            return call.run([leaf.full_tensor() if isinstance(leaf, BatchTensor) else leaf for leaf in call.leaves])

    def _reaches_in(self, module: nn.Module, learned: Learned) -> bool:
        if self.view.own.exact:  # aliases stand for its parameters
            return True
        norms = self._whole_norm and any(isinstance(part, _BatchNorm) and part.training for part in module.modules())
        return norms or bool(learned.draws and self._own_stream is None)

    @contextmanager
    def computed_whole(self) -> Iterator[None]:
        """What is called meanwhile is not cut: the tracing of a module, say."""
        with self._during(_Inside()):
            yield

    @contextmanager
    def _during(self, inside: _Inside) -> Iterator[None]:
        before, self.inside = self.inside, inside
        try:
            yield
        finally:
            self.inside = before

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """During a backward pass: a module called now computes an activation anew, for the rows it was given."""
        with self._during(_Inside(recomputing=True)):
            yield

    def checkpoint(
        self, original: Original, function: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A checkpoint, by torch's `original`: the function's activations are computed anew in the backward pass.

        Outside of a boundary the modules that it calls are boundaries then, too, and draw from the state that torch
        puts back; inside it makes the draws that it made.
        """
        outside, around = self.inside is None, self._around

        def again(*args: Any, **kwargs: Any) -> Any:
            inside = self.inside
            if inside is None or not inside.recomputing:
                return function(*args, **kwargs)
            if not outside:
                return self._redrawn(inside, function, args, kwargs)
            self.inside, before, self._around = None, self._around, around
            try:
                return function(*args, **kwargs)
            finally:
                self.inside, self._around = inside, before

        return on_rows(original, again, args, kwargs) if outside else original(again, *args, **kwargs)

    def _redrawn(self, inside: _Inside, function: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inside.redrawing:
            return function(*args, **kwargs)
        inside.redrawing = True
        try:
            with self._mode:
                return function(*args, **kwargs)
        finally:
            inside.redrawing = False

    # --- inside

    def _part(
        self, inside: _Inside, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call inside of a boundary in which something is drawn, or learned."""
        if inside.learning is not None:
            return inside.learning.call(original, module, args, kwargs)
        if inside.recomputing:
            return self._redrawn(inside, original, (module, *args), kwargs)
        if module in inside.unmet:
            self._meet(inside, original, module, args, kwargs)
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

    def _meet(
        self, inside: _Inside, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A part that is called for the first time (layers that are skipped at random): find out what it draws."""
        assert inside.cut is not None
        assert inside.drawers is not None
        assert inside.learned is not None
        leaves, tree = tree_flatten((args, kwargs))
        with _disable_current_modes():
            found = self.seams.meet(Call(original, module, leaves, tree, None), inside.cut.largest)
        name = inside.unmet.pop(module)
        if found is None:
            raise Refused(
                f"{name} is called for the first time at {user_line()}, and its rows depend on each other; "
                "run this script on one device"
            )
        inside.drawers.update(_drawers_in(module, found.draws, inside.cut))
        inside.learned.met(name, found)
        inside.unmet = {part: path for part, path in inside.unmet.items() if path in inside.learned.unmet}

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A random operator inside of a boundary."""
        assert self.inside is not None
        state = random_digest()
        if not self.inside.recomputing:
            self._drawn[state] = self._next_place(self.inside.drawing[-1])
            if len(self._drawn) > REMEMBERED:
                self._drawn.pop(next(iter(self._drawn)))
        place, cut = self._drawn.get(state, (None, None))
        if place is None or cut is None:
            return func(*args, **kwargs)
        spec = self._spec(place, shape_drawn(args, kwargs), cut, self.inside.view or self.view)
        draw = draw_own_rows if self._once is None else self._once.draw
        return draw(func, args, kwargs, spec, place.order)

    def _next_place(self, drawer: _Drawer) -> tuple[Place | None, Cut]:
        drawer.count += 1
        if drawer.count > len(drawer.places) and len(set(drawer.places)) == 1:
            return drawer.places[0], drawer.cut
        if drawer.count > len(drawer.places):
            raise Refused(
                f"{drawer.name or 'the model'} draws more random numbers than in its first call ({user_line()}); "
                "--randomness worker lets each rank draw its own"
            )
        return drawer.places[drawer.count - 1], drawer.cut

    # --- out

    def _wrapped(self, out: Any, places: tuple[Place | None, ...], cut: Cut, view: View) -> Any:
        if isinstance(out, Tensor) and len(places) == 1 and places[0] is not None:
            return BatchTensor(out, self._spec(places[0], tuple(out.shape), cut, view))
        contents = Contents(out)
        if len(contents.leaves) != len(places):
            raise Refused(
                f"the model gave {len(contents.leaves)} outputs, but {len(places)} at first ({user_line()})"
            )
        return contents.put(
            [
                BatchTensor(leaf, self._spec(place, tuple(leaf.shape), cut, view)) if place is not None else leaf
                for leaf, place in zip(contents.leaves, places, strict=True)
            ]
        )

    def _spec(self, place: Place, shape: tuple[int, ...], cut: Cut, view: View) -> Spec:
        """Where the batch is in a tensor that came out, or is drawn, inside."""
        return spec_at(view, place, shape, cut)


def _drawers_in(module: nn.Module, draws: dict[str, tuple[Place | None, ...]], cut: Cut) -> dict[nn.Module, _Drawer]:
    return {module.get_submodule(name): _Drawer(name, cut, places) for name, places in draws.items()}
