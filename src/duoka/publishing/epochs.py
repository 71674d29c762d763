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
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from duoka.system.modules import is_users

MOST_FRAMES = 60
_AROUND = {"tqdm", "trange", "track", "range"}  # calls around the numbers of a loop


class EpochLoop(NamedTuple):
    """A loop, and where it is.

    line: as `train.py:41`. done: rounds that were ended before this one. ends_early: it has a `break` or `return`.
    """

    line: str
    done: int
    rounds: int
    ends_early: bool


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
                inner = next((loop.lineno for loop in loops if loop.lineno <= line < loop.body[0].lineno), None)
                if inner is None and any(_encloses(loop, line) for loop in loops):
                    return None  # a batch is taken by `next` within a loop
            if inner is not None:
                around = [loop for loop in loops if _encloses(loop, line)]
                if around:
                    return _epoch_loop(around[-1], frame)
        frame = frame.f_back
    return None


@cache
def _loops(filename: str) -> tuple[ast.For | ast.While, ...]:
    """Return the loops of a file, outer ones before those in them; empty if its source is not known."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))]
    return tuple(sorted(loops, key=lambda node: node.lineno))


def _encloses(loop: ast.For | ast.While, line: int) -> bool:
    return loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or 0)


def _epoch_loop(loop: ast.For | ast.While, frame: FrameType) -> EpochLoop | None:
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
        return None
    names, numbers = {**frame.f_globals, **frame.f_locals}, None
    value = names.get(loop.target.id)
    with suppress(TypeError, KeyError, ValueError):  # it is not known
        numbers = _range(loop.iter, names)
    if numbers is None or not isinstance(value, int) or value not in numbers or _sets_loop_variables(loop):
        return None
    line = f"{Path(frame.f_code.co_filename).name}:{loop.lineno}"
    return EpochLoop(line, numbers.index(value), len(numbers), _may_end_early(loop))


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
        return range(*(_int(number, names) for number in node.args)) if names.get("range", range) is range else None
    first = node.args[0]
    return range(_int(first, names)) if function == "trange" else _range(first, names)


def _int(node: ast.expr, names: dict[str, Any]) -> int:
    number = _value(node, names)
    if type(number) is not int:
        raise TypeError("not a whole number")
    return number


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return the value of numbers, names, attributes, entries of dicts and their sums; raises an error of others."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        attributes = vars(owner)
        return attributes[node.attr] if node.attr in attributes else vars(type(owner))[node.attr]
    if isinstance(node, ast.Subscript):
        owner = _value(node.value, names)
        if type(owner) is dict:
            return owner[_value(node.slice, names)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_int(node.operand, names)
    if isinstance(node, ast.BinOp):
        left, right = _int(node.left, names), _int(node.right, names)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
    raise TypeError("not to be known without calling anything")


def _sets_loop_variables(loop: ast.For) -> bool:
    """Return whether the loop's body assigns to the loop variable or to a name in the loop's iterable."""
    used = {node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)} | {loop.target.id}  # type: ignore[attr-defined]
    parts = (node for line in loop.body for node in ast.walk(line))
    return any(isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in used for node in parts)


def _may_end_early(loop: ast.For) -> bool:
    """Return whether a loop has a `return`, or a `break` that is not an inner loop's."""
    waiting: list[tuple[ast.AST, bool]] = [(loop, False)]  # and whether an inner loop is around
    while waiting:
        node, within = waiting.pop()
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and not within):
            return True
        within = within or (node is not loop and isinstance(node, (ast.For, ast.While, ast.AsyncFor)))
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting += [(child, within) for child in ast.iter_child_nodes(node)]
    return False
