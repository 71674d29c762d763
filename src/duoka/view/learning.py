"""How a module treats a batch, found out by a second look at some of its rows.

The module is run twice: over this rank's rows, and over those in the middle alone. The shapes that differ tell
where the batch is in every output and every random draw; the values of the common rows tell whether rows mix.
(The middle: a model that looks back or ahead would hide it from the first, or the last.) In the second run every
draw gives these rows what it gave them in the first, so randomness excuses nothing. A witness sees what values
cannot tell. Nothing of it is left behind.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from duoka.errors import Refused
from duoka.private.torch import tree_leaves, tree_map_only
from duoka.view.batch import Spec
from duoka.view.contents import Contents
from duoka.view.cut import Cut
from duoka.view.draws import (
    draw_again_from,
    draw_own_rows,
    is_by_value,
    memory_order,
    shape_drawn,
    state_drawn_from,
)
from duoka.view.site import user_line
from duoka.view.traceless import same_things, traceless
from duoka.view.view import View
from duoka.view.witness import Mixed, Raised, Witness

Call = Callable[[int, int], Any]  # run the module over own rows [start, stop), made by `Learning.given`


@dataclass(frozen=True, slots=True)
class Place:
    """Where samples are: dimension `dim` has as many entries for each, side by side or (`outer`) strided.

    order: of a draw, how its dimensions lie in memory.
    """

    dim: int
    outer: bool = False
    order: tuple[int, ...] | None = None


@dataclass(slots=True)
class Learned:
    """How to cut one kind of call: the place of the batch in each output and in each draw of each module.

    leaves: it has to do with tensors that need gradients and are not the module's parameters. unmet: the parts that
    were not called. reads: the script's lines in it that read into Python what has nothing to do with the batch.
    traces: it leaves something behind, be it a count of its calls. followed: a graph of its has been followed to the
    tensors that need gradients.
    """

    outputs: tuple[Place | None, ...]
    draws: dict[str, tuple[Place | None, ...]]
    leaves: bool = False
    unmet: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    traces: bool = False
    followed: bool = False

    def met(self, name: str, part: Learned) -> None:
        """A part was called for the first time."""
        path = f"{name}." if name else ""
        self.draws.update({(path + below).removesuffix("."): places for below, places in part.draws.items()})
        called = {other for other in self.unmet if other == name or other.startswith(path)}
        self.unmet = self.unmet - called | {path + below for below in part.unmet}
        self.reads |= part.reads
        self.traces |= part.traces


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # are not called themselves


class Unclear(Exception):
    """These rows do not tell (all alike): ask again with others."""


@dataclass(slots=True)
class _Draw:
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    state: Any  # of the generator, before
    values: list[Tensor]  # drawn for, where it depends on them how much is drawn


@dataclass(frozen=True, slots=True)
class _Some:
    """Some of the rows that were drawn for in the first run, as `draw_own_rows` asks for them."""

    place: Place
    size: int
    rows: int
    part: tuple[int, int]
    wholes: dict[int, Tensor]  # by the identity of their rows

    @property
    def dim(self) -> int:
        return self.place.dim

    @property
    def local_size(self) -> int:
        return self.size // self.rows * (self.part[1] - self.part[0])

    def own(self, whole: Tensor) -> Tensor:
        return some_rows(whole, self.place, self.rows, self.part)

    def gather(self, local: Tensor) -> Tensor:
        whole = self.wholes[id(local)].clone()
        self.own(whole).copy_(local)
        return whole


@dataclass(slots=True)
class _Tape:
    """The draws of a run, by module, in order; in the second run they are repeated for fewer rows."""

    rows: int
    outer: bool  # where several entries belong to a sample: strided, or side by side
    first: dict[str, list[_Draw]] = field(default_factory=dict)
    places: dict[str, list[Place | None]] = field(default_factory=dict)
    longest: list[int] = field(default_factory=list)  # of the sequences that are padded, by the first run
    padded: int = 0  # how often that was asked in the second run
    part: tuple[int, int] = (0, 0)  # the rows of the second run

    def place(self, draw: _Draw, wanted: tuple[int, ...]) -> Place | None:
        """Where the batch is in a draw that the second run makes for the shape `wanted`."""
        place = place_of(draw.shape, wanted, self.rows, self.part[1] - self.part[0])
        if place is None:
            return None
        several = draw.shape[place.dim] != self.rows
        return Place(place.dim, several and self.outer, draw.order)

    def is_doubtful(self) -> bool:
        """Whether a draw has several entries for a sample in the batch's dimension."""
        return any(
            place is not None and draw.shape[place.dim] != self.rows
            for name, places in self.places.items()
            for place, draw in zip(places, self.first[name], strict=False)
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run gave: its outputs, which of them come of rows, and what was left in attributes and elsewhere.

    traces: whether anything is no longer what it was. short: whether anything in it was computed in 16 bits.
    """

    outputs: list[Any]
    of_rows: list[bool]
    values: list[Any]
    written: list[Tensor]
    leaves: bool
    reads: set[str]
    traces: bool
    short: bool


class Learning:
    """One module's two runs. `names` gives each submodule's path; `owner` whose forward is running.

    meets_nobody: its rows cannot be gathered while it runs.
    """

    def __init__(self, module: nn.Module, meets_nobody: bool = False) -> None:
        self.module, self._meets_nobody = module, meets_nobody
        self.names = {id(part): name for name, part in module.named_modules()}
        self.owner = ""
        self._unmet = {name for name, part in module.named_modules() if name and not isinstance(part, _LISTS)}
        self._tape: _Tape | None = None
        self._witness = Witness(self._draw)
        self._replaying = False  # the second run

    def call(self, original: Callable[..., Any], part: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call inside the module: draws belong to the innermost part that is running."""
        before, self.owner = self.owner, self.names.get(id(part), self.owner)
        self._unmet.discard(self.owner)
        try:
            return original(part, *args, **kwargs)
        finally:
            self.owner = before

    def longest(self, mine: int) -> int:
        """How long sequences are padded: as the longest of all of the first run's rows."""
        if self._meets_nobody:
            self.mixes("pads sequences to the longest of the batch")
        tape = self._tape
        assert tape is not None
        if not self._replaying:
            tape.longest.append(mine)
            return mine
        tape.padded += 1
        return tape.longest[tape.padded - 1] if tape.padded <= len(tape.longest) else mine

    def given(self, tensor: Tensor, of_rows: bool = True, requires_grad: bool = False) -> Tensor:
        """An input of a run: rows, or a tensor that all ranks hold whole."""
        return self._witness.given(tensor, of_rows, requires_grad)

    def mixes(self, reason: str) -> NoReturn:
        """The module does something at which rows cannot be told apart."""
        self._witness.mixes(reason)

    def learn(self, run: Call, rows: int) -> Learned:
        """What runs over all of `rows` rows, and over some of them, tell. Raises Mixed or Unclear."""
        for outer in (False, True):
            self._tape = tape = _Tape(rows, outer)
            whole = self._run(run, (0, rows), replaying=False)
            try:
                found = [self._compared(run, whole, part) for part in _parts(rows)]
            except Mixed:
                if not tape.is_doubtful() or outer:
                    raise
                continue
            if any(one != found[0] for one in found):
                raise Mixed("other parts of the batch are cut in another way")
            return found[0]
        raise AssertionError

    def _compared(self, run: Call, whole: _Run, part: tuple[int, int]) -> Learned:
        """What a run over a part of the rows tells, beside the one over all."""
        tape = self._tape
        assert tape is not None
        tape.part, tape.places, tape.padded = part, {}, 0
        some = self._run(run, part, replaying=True)
        if some.values != whole.values or not _equal(some.written, whole.written, whole.short):
            raise Mixed("it counts the rows of the batch")
        outputs = _compare(whole, some, tape.rows, part)
        draws = {name: tuple(places) for name, places in tape.places.items()}
        reads = frozenset(whole.reads | some.reads)
        leaves, traces = whole.leaves or some.leaves, whole.traces or some.traces
        return Learned(outputs, draws, leaves, frozenset(self._unmet), reads, traces)

    def _run(self, run: Call, part: tuple[int, int], replaying: bool) -> _Run:
        self._replaying = replaying
        torch.clear_autocast_cache()  # what it cast before would be taken for a tensor from elsewhere
        self._witness = witness = Witness(self._draw)
        with traceless(self.module) as remains:
            before = remains.everything()
            try:
                with witness, redirect_stdout(_Printing(self)):
                    outputs = Contents(run(*part)).leaves
                leaves = witness.foreign(outputs, self.module)
            except (Mixed, Unclear, KeyboardInterrupt):
                raise
            except Exception as error:
                if str(error).startswith("DataLoader worker"):
                    raise  # a signal handler's, which may come anywhere: the module has no part in it
                raise Raised(f"it raised {type(error).__name__}: {error}") from error
            finally:
                values, kept = remains.values(), remains.holds(witness.rows)
                traces = not same_things(before, remains.everything())
                written = witness.put_back()
        if witness.reason:  # and the module went on
            raise Mixed(witness.reason)
        if kept:
            raise Mixed(f"it keeps something of the batch in {kept}")
        of_rows = [leaf in witness.rows for leaf in outputs]
        outputs = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        if witness.forget_rows():
            raise Mixed("it keeps something of the batch elsewhere")
        return _Run(outputs, of_rows, values, written, leaves, witness.reads, traces or bool(written), witness.short)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = self._tape
        assert tape is not None
        if self._meets_nobody and is_by_value(func):
            self.mixes("draws as many random numbers as all rows ask for")
        shape = shape_drawn(args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._replaying:
            order = memory_order(args[0]) if args and isinstance(args[0], Tensor) else None
            values = [tensor.clone() for tensor in tensors] if is_by_value(func) else []
            draw = _Draw(shape, order, state_drawn_from(kwargs), values)
            tape.first.setdefault(self.owner, []).append(draw)
            return func(*args, **kwargs)
        places = tape.places.setdefault(self.owner, [])
        earlier = tape.first.get(self.owner, [])
        if len(places) >= len(earlier):
            raise Mixed("it draws another number of random numbers for fewer rows")
        draw = earlier[len(places)]
        place = tape.place(draw, shape)
        places.append(place)
        draw_again_from(draw.state, kwargs)
        if place is None:
            return func(*args, **kwargs)
        wholes = {id(tensor): value for tensor, value in zip(tensors, draw.values, strict=False)}
        some = _Some(place, draw.shape[place.dim], tape.rows, tape.part, wholes)
        out = draw_own_rows(func, args, kwargs, some, place.order)
        tree_map_only(Tensor, self._witness.rows.add, out)
        return out


class _Printing(io.StringIO):
    """Standard output meanwhile: what is printed must be the whole batch's."""

    def __init__(self, learning: Learning) -> None:
        super().__init__()
        self._learning = learning

    def write(self, text: str) -> int:
        self._learning.mixes("prints")


def _parts(rows: int) -> list[tuple[int, int]]:
    """Rows to look at by themselves: first neither the first (a model that looks back) nor the last among them.

    No row is in all of them: one that decides for all (the largest) is missed somewhere.
    """
    if rows == 2:
        return [(1, 2), (0, 1)]
    edge, half = max(1, rows // 4), rows // 2
    return [(1, 2), (0, 1)] if rows == 3 else [(edge, rows - edge), (half, rows), (0, half)]


def place_of(shape: tuple[int, ...], fewer: tuple[int, ...], rows: int, some: int) -> Place | None:
    """The dimension that went from `rows` samples to `some`; None if the shapes are equal. Raises Mixed."""
    changed = [dim for dim in range(len(shape)) if len(shape) == len(fewer) and shape[dim] != fewer[dim]]
    if shape == fewer:
        return None
    if len(changed) != 1 or shape[changed[0]] % rows or shape[changed[0]] // rows * some != fewer[changed[0]]:
        raise Mixed(f"a tensor of shape {shape} for {rows} rows has shape {fewer} for {some}")
    return Place(changed[0])


def spec_at(view: View, place: Place, shape: tuple[int, ...], cut: Cut) -> Spec:
    """Where the batch is in a tensor of these rows, of which a learned place is known.

    Raises:
        Refused: its shape does not fit that.
    """
    each, rest = divmod(shape[place.dim], cut.rows)
    if rest:
        raise Refused(f"a tensor of shape {shape} does not hold {cut.rows} rows, as it should ({user_line()})")
    return Spec(view, cut, place.dim, each if place.outer else 1, 1 if place.outer else each)


def some_rows(tensor: Tensor, place: Place, rows: int, part: tuple[int, int]) -> Tensor:
    """The entries of some of `rows` samples."""
    each = tensor.shape[place.dim] // rows
    first, some = part[0], part[1] - part[0]
    if not place.outer:
        return tensor.narrow(place.dim, first * each, some * each)
    apart = tensor.unflatten(place.dim, (each, rows))
    found: Tensor = apart.narrow(place.dim + 1, first, some).flatten(place.dim, place.dim + 1)
    return found


def _compare(whole: _Run, some: _Run, rows: int, part: tuple[int, int]) -> tuple[Place | None, ...]:
    """The batch's place in every output; raises Mixed where common rows differ, Unclear where all are alike."""
    if len(whole.outputs) != len(some.outputs):
        raise Mixed("it gives another number of outputs for fewer rows")
    places: list[Place | None] = []
    told = False
    for one, other, of_rows in zip(whole.outputs, some.outputs, map(max, whole.of_rows, some.of_rows), strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if isinstance(one, Tensor) or isinstance(other, Tensor) or not _same_value(one, other):
                raise Mixed("it gives other values for fewer rows")
            places.append(None)
            continue
        place = place_of(tuple(one.shape), tuple(other.shape), rows, part[1] - part[0])
        if place is None:
            if of_rows or not _agree(one, other, whole.short):  # a loss, say: not this rank's to give
                raise Mixed("it gives a result of the batch as a whole")
            places.append(None)
            continue
        candidates = [place] if one.shape[place.dim] == rows else [place, Place(place.dim, outer=True)]
        fitting = [p for p in candidates if _agree(some_rows(one, p, rows, part), other, whole.short)]
        if not fitting:
            raise Mixed("its rows depend on each other")
        places.append(fitting[0])
        told = told or _varies(one, place.dim)
    if not told:
        raise Unclear
    return tuple(places)


def _equal(ones: list[Tensor], others: list[Tensor], short: bool) -> bool:
    """Whether the same was written, up to rounding."""
    return len(ones) == len(others) and all(
        one.shape == other.shape and _agree(one, other, short) for one, other in zip(ones, others, strict=True)
    )


def _same_value(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or one == other)
    except Exception:
        return False


def _agree(one: Tensor, other: Tensor, short: bool) -> bool:
    if one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    rtol, atol = (5e-2, 2e-2) if short else (1e-3, 1e-4)
    one, other = one.double(), other.double()
    scale = torch.nan_to_num(one).abs().max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=rtol, atol=atol * scale, equal_nan=True)


def _varies(tensor: Tensor, dim: int) -> bool:
    """Whether samples differ at all: equal ones cannot tell whether they mix."""
    first = tensor.narrow(dim, 0, 1)
    return not torch.equal(tensor, first.expand_as(tensor))
