"""The loop over epochs around a loop over a loader: which epoch it is, of how many, read from the script's frames.

    for epoch in range(start, args.epochs):
        for x, y in loader:

Known are loops over a `range` (also in tqdm's or rich's bars, and a checkpoint's `epochs`) of numbers, variables,
attributes and their sums, which the loop itself does not set. No code of the script is called to find them. Other
loops are not shown.
"""

from __future__ import annotations

import ast
import linecache
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from duoka.system.modules import is_users

if TYPE_CHECKING:
    from duoka.publishing.publisher import Publisher

MOST_FRAMES = 60
_AROUND = {"tqdm", "trange", "track", "range"}  # calls around the numbers of a loop


class EpochLoop(NamedTuple):
    """A loop, and where it is.

    place: of its line. done: rounds that were ended before this one. ends_early: it has a `break` or `return`.
    """

    place: str
    done: int
    rounds: int
    ends_early: bool


class EpochLoops:
    """Publishes the loop over epochs, looked for whenever a loop over a loader begins."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._now: tuple[str, int] = ("", -1)
        self._begun: dict[str, tuple[float, int]] = {}  # place -> when it was first seen, and what was done then

    def look(self) -> None:
        """Look for the loop around the caller, and publish it if it is in another round than before."""
        with suppress(Exception):  # the script must not see it
            found = epoch_loop(sys._getframe(1))
            if found is None or (found.place, found.done) == self._now:
                return
            if found.place != self._now[0] or found.done < self._now[1]:
                self._begun[found.place] = time.monotonic(), found.done
            self._now = found.place, found.done
            begun, first = self._begun[found.place]
            self._publisher.slot.begin_epoch()
            self._publisher.show(epochs=found._asdict() | {"begun": begun, "first": first})


def epoch_loop(frame: FrameType | None) -> EpochLoop | None:
    """Return the loop around the loop over a loader that has just begun in this frame or one above it."""
    inner: int | None = None  # line of the loop over the loader, in the frame that has it
    for _ in range(MOST_FRAMES):
        if frame is None:
            return None
        if is_users(frame.f_code.co_filename):
            loops = _loops(frame.f_code.co_filename)
            line = frame.f_lineno
            if inner is None:
                inner = next((one.lineno for one in loops if one.lineno <= line < one.body[0].lineno), None)
                if inner is None and any(_encloses(one, line) for one in loops):
                    return None  # a batch is taken by `next` within a loop
            if inner is not None:
                around = [one for one in loops if _encloses(one, line)]
                if around:
                    return _known(around[-1], frame)
        frame = frame.f_back
    return None


@cache
def _loops(filename: str) -> tuple[ast.For | ast.While, ...]:
    """Return the loops of a file, outer ones before those in them; empty if its source is not known."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    found = [one for one in ast.walk(tree) if isinstance(one, (ast.For, ast.While))]
    return tuple(sorted(found, key=lambda one: one.lineno))


def _encloses(loop: ast.For | ast.While, line: int) -> bool:
    return loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or 0)


def _known(loop: ast.For | ast.While, frame: FrameType) -> EpochLoop | None:
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
        return None
    names, numbers = {**frame.f_globals, **frame.f_locals}, None
    now = names.get(loop.target.id)
    with suppress(TypeError, KeyError, ValueError):  # it is not known
        numbers = _range(loop.iter, names)
    if numbers is None or not isinstance(now, int) or now not in numbers or _sets_own_names(loop):
        return None
    place = f"{Path(frame.f_code.co_filename).name}:{loop.lineno}"
    return EpochLoop(place, numbers.index(now), len(numbers), any(_ways_out(loop.body)))


def _range(node: ast.expr, names: dict[str, Any]) -> range | None:
    """Return the numbers of a loop; None if they are not known without calling anything."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if function == "epochs" and isinstance(node.func, ast.Attribute):
        owner = _value(node.func.value, names)
        return range(_int(node.args[0], names)) if type(owner).__module__.startswith("duoka.") else None
    if function not in _AROUND:
        return None
    if function == "range":
        return range(*(_int(one, names) for one in node.args)) if names.get("range", range) is range else None
    first = node.args[0]
    return range(_int(first, names)) if function == "trange" else _range(first, names)


def _int(node: ast.expr, names: dict[str, Any]) -> int:
    found = _value(node, names)
    if type(found) is not int:
        raise TypeError("not a whole number")
    return found


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of numbers, names, attributes, entries of dicts and their sums; raises an error of others."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        own = vars(owner)
        return own[node.attr] if node.attr in own else vars(type(owner))[node.attr]
    if isinstance(node, ast.Subscript):
        owner = _value(node.value, names)
        if type(owner) is dict:
            return owner[_value(node.slice, names)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_int(node.operand, names)
    if isinstance(node, ast.BinOp):
        one, other = _int(node.left, names), _int(node.right, names)
        if isinstance(node.op, ast.Add):
            return one + other
        if isinstance(node.op, ast.Sub):
            return one - other
    raise TypeError("not to be known without calling anything")


def _sets_own_names(loop: ast.For) -> bool:
    """Return whether the loop's body assigns to the loop variable or to a name in the loop's iterable."""
    used = {one.id for one in ast.walk(loop.iter) if isinstance(one, ast.Name)} | {loop.target.id}  # type: ignore[attr-defined]
    parts = (one for line in loop.body for one in ast.walk(line))
    return any(isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one.id in used for one in parts)


def _ways_out(body: list[Any], own: bool = True) -> Iterator[bool]:
    """Yield True for each `return` in the body, and each `break` of the loop itself. own: no inner loop is around."""
    for one in body:
        if isinstance(one, ast.Return) or (isinstance(one, ast.Break) and own):
            yield True
        elif isinstance(one, (ast.For, ast.While, ast.AsyncFor)):
            yield from _ways_out(one.body, False)
            yield from _ways_out(one.orelse, own)
        elif not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _ways_out([child for child in ast.iter_child_nodes(one) if isinstance(child, ast.stmt)], own)
            inner = (*getattr(one, "handlers", ()), *getattr(one, "cases", ()))
            yield from _ways_out([child for part in inner for child in part.body], own)
