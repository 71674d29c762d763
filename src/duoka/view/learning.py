"""How a module treats a batch, found out by a second look at some of its rows.

The module is run twice without gradients: over this rank's rows, and over the last of them alone. The shapes
that differ tell where the batch is in every output and every random draw; the values of the common rows tell
whether rows mix. (The last rows, not the first: a causal model would hide that it mixes.) In the second run
every draw repeats the first one's, so randomness excuses nothing. Nothing of it is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from duoka.view.draws import SeededMode, memory_order, random_states, set_random_states, shape_drawn

Call = Callable[[int, int], Any]  # run the module over own rows [start, stop)


@dataclass(frozen=True, slots=True)
class Place:
    """Where samples are: dimension `dim` has as many entries for each, side by side or (`outer`) strided.

    order: of a draw, how its dimensions lie in memory.
    """

    dim: int
    outer: bool = False
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Learned:
    """How to cut one kind of call: the place of the batch in each output and in each draw of each module."""

    outputs: tuple[Place | None, ...]
    draws: dict[str, tuple[Place | None, ...]]


class Mixed(Exception):
    """Rows are not independent of each other, or it cannot be told that they are."""


class Unclear(Exception):
    """These rows do not tell (all alike): ask again with others."""


@dataclass(slots=True)
class _Draw:
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    result: Any


@dataclass(slots=True)
class _Tape:
    """The draws of a run, by module, in order; in the second run they are repeated for fewer rows."""

    rows: int
    first: dict[str, list[_Draw]] = field(default_factory=dict)
    places: dict[str, list[Place | None]] = field(default_factory=dict)
    outer: bool = False  # where several entries belong to a sample: strided, or side by side


class Learning:
    """One module's two runs. `names` gives each submodule's path; `owner` whose forward is running."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = {id(part): name for name, part in module.named_modules()}
        self.owner = ""
        self._tape: _Tape | None = None
        self._replaying = 0  # rows of the second run

    def call(self, original: Callable[..., Any], part: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call inside the module: draws belong to the innermost part that is running."""
        before, self.owner = self.owner, self.names.get(id(part), self.owner)
        try:
            return original(part, *args, **kwargs)
        finally:
            self.owner = before

    def learn(self, run: Call, rows: int) -> Learned:
        """What two runs over `rows` rows tell. Raises Mixed or Unclear."""
        first_of_some = rows // 2
        doubtful = False
        for outer in (False, True):
            self._tape = _Tape(rows, outer=outer)
            with _traceless(self.module) as changed:
                whole = self._run(run, 0, rows, 0)
                if changed():
                    raise Mixed
            with _traceless(self.module):
                some = self._run(run, first_of_some, rows, rows - first_of_some)
            doubtful = self._is_doubtful()
            try:
                outputs = _compare(whole, some, rows, rows - first_of_some)
            except Mixed:
                if not doubtful or outer:
                    raise
                continue
            return Learned(outputs, {name: tuple(places) for name, places in self._tape.places.items()})
        raise Mixed

    def _run(self, run: Call, start: int, stop: int, replaying: int) -> list[Any]:
        self._replaying = replaying
        with torch.no_grad(), SeededMode(self._draw):
            try:
                out = run(start, stop)
            except (Mixed, Unclear, KeyboardInterrupt):
                raise
            except Exception as error:
                raise Mixed from error
        return tree_leaves(out)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = self._tape
        assert tape is not None
        shape = shape_drawn(args, kwargs)
        if not self._replaying:
            result = func(*args, **kwargs)
            order = memory_order(args[0]) if args and isinstance(args[0], Tensor) else None
            draw = _Draw(shape, order, tree_map_only(Tensor, Tensor.clone, result))
            tape.first.setdefault(self.owner, []).append(draw)
            return result
        places = tape.places.setdefault(self.owner, [])
        earlier = tape.first.get(self.owner, [])
        if len(places) >= len(earlier):
            raise Mixed  # another number of draws
        draw = earlier[len(places)]
        place = self._place(draw, shape, tape)
        places.append(place)
        result = draw.result if place is None else tree_map_only(Tensor, lambda t: self._last(t, place), draw.result)
        if func.overloadpacket.__name__.endswith("_"):
            return args[0].copy_(result)
        return result

    def _place(self, draw: _Draw, wanted: tuple[int, ...], tape: _Tape) -> Place | None:
        place = place_of(draw.shape, wanted, tape.rows, self._replaying)
        if place is None:
            return None
        several = draw.shape[place.dim] != tape.rows
        return Place(place.dim, several and tape.outer, draw.order)

    def _last(self, drawn: Tensor, place: Place) -> Tensor:
        assert self._tape is not None
        return last_rows(drawn, place, self._tape.rows, self._replaying)

    def _is_doubtful(self) -> bool:
        """Whether a draw has several entries for a sample in the batch's dimension."""
        assert self._tape is not None
        return any(
            place is not None and draw.shape[place.dim] != self._tape.rows
            for name, places in self._tape.places.items()
            for place, draw in zip(places, self._tape.first[name], strict=False)
        )


def place_of(shape: tuple[int, ...], fewer: tuple[int, ...], rows: int, some: int) -> Place | None:
    """The dimension that went from `rows` samples to `some`; None if the shapes are equal. Raises Mixed."""
    if len(shape) != len(fewer):
        raise Mixed
    changed = [dim for dim in range(len(shape)) if shape[dim] != fewer[dim]]
    if not changed:
        return None
    if len(changed) > 1 or shape[changed[0]] % rows or shape[changed[0]] // rows * some != fewer[changed[0]]:
        raise Mixed
    return Place(changed[0])


def last_rows(tensor: Tensor, place: Place, rows: int, some: int) -> Tensor:
    """The entries of the last `some` of `rows` samples."""
    each = tensor.shape[place.dim] // rows
    if not place.outer:
        return tensor.narrow(place.dim, (rows - some) * each, some * each)
    apart = tensor.unflatten(place.dim, (each, rows))
    last: Tensor = apart.narrow(place.dim + 1, rows - some, some).flatten(place.dim, place.dim + 1)
    return last


def _compare(whole: list[Any], some: list[Any], rows: int, fewer: int) -> tuple[Place | None, ...]:
    """The batch's place in every output; raises Mixed where common rows differ, Unclear where all are alike."""
    if len(whole) != len(some):
        raise Mixed
    places: list[Place | None] = []
    told = False
    for one, other in zip(whole, some, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if isinstance(one, Tensor) or isinstance(other, Tensor) or not _same_value(one, other):
                raise Mixed
            places.append(None)
            continue
        place = place_of(tuple(one.shape), tuple(other.shape), rows, fewer)
        if place is None:  # a result of the whole batch (a loss, say): not this rank's to give
            raise Mixed
        candidates = [place] if one.shape[place.dim] == rows else [place, Place(place.dim, outer=True)]
        fitting = [p for p in candidates if _agree(last_rows(one, p, rows, fewer), other)]
        if not fitting:
            raise Mixed
        places.append(fitting[0])
        told = told or _varies(one, place.dim)
    if not told:
        raise Unclear
    return tuple(places)


def _same_value(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or one == other or (type(one) is type(other) and not hasattr(one, "__dict__")))
    except Exception:
        return False


def _agree(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    short = one.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(one.device.type)
    rtol, atol = (5e-2, 2e-2) if short else (1e-3, 1e-4)
    one, other = one.double(), other.double()
    scale = torch.nan_to_num(one).abs().max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=rtol, atol=atol * scale, equal_nan=True)


def _varies(tensor: Tensor, dim: int) -> bool:
    """Whether samples differ at all: equal ones cannot tell whether they mix."""
    first = tensor.narrow(dim, 0, 1)
    return not torch.equal(tensor, first.expand_as(tensor))


@contextmanager
def _traceless(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Put back what a run changes: buffers, attributes, random states. BatchNorm is set aside (evaluation).

    Gives a function that tells whether the run changed what other code may read: a buffer, or a tensor in an
    attribute.
    """
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]
    parts = [(part, dict(part.__dict__), _contents(part.__dict__)) for part in module.modules()]
    buffers = [
        (part, name, buffer, buffer.clone()) for part in module.modules() for name, buffer in _own_buffers(part)
    ]
    states = random_states()
    for norm in norms:
        norm.training = False

    def changed() -> bool:
        for part, name, buffer, kept in buffers:
            now = part._buffers.get(name)
            if now is not buffer or not torch.equal(buffer, kept):
                return True
        return any(_leaves_a_trace(part, before, contents) for part, before, contents in parts)

    try:
        yield changed
    finally:
        for norm in norms:
            norm.training = True
        for part, before, contents in parts:
            part.__dict__.clear()
            part.__dict__.update(before)
            for name, content in contents.items():
                _refill(part.__dict__[name], content)
        for part, name, buffer, kept in buffers:
            part._buffers[name] = buffer
            if not torch.equal(buffer, kept):
                with torch.no_grad():
                    buffer.copy_(kept)
        set_random_states(states)


_OWN = ("_parameters", "_buffers", "_modules", "training")


def _own_buffers(part: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in part._buffers.items() if buffer is not None]


def _contents(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.copy()
        for name, value in attributes.items()
        if type(value) in (list, dict, set) and not name.startswith("_")
    }


def _refill(container: Any, content: Any) -> None:
    if container == content if not _holds_tensor(content) else len(container) == len(content):
        return
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


def _leaves_a_trace(part: nn.Module, before: dict[str, Any], contents: dict[str, Any]) -> bool:
    for name, value in part.__dict__.items():
        if name in _OWN:
            continue
        if (name not in before or before[name] is not value) and _holds_tensor(value):
            return True
        if name in contents and len(value) != len(contents[name]):
            return True
    return False


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, (Tensor, float)) for leaf in tree_leaves(value))
