"""Find where the ranks of a script went apart, and by which value, from their frames at the error.

Why: docs/decisions/0125-ranks-apart.md.
"""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator, Mapping, Sequence

from duoka.supervision.status_board import name_ranks, ranks_by
from duoka.supervision.tracebacks import AT_END_LINE, FrameValues

MOST = 6  # values that are shown
MOST_BRANCHES = 3  # statements that are shown
_BRANCHES = (ast.If, ast.While, ast.For, ast.Try, ast.Match)
_LOOPS = (ast.For, ast.While)
_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Raise)
_ADVICE = (
    "  what differs between processes (their ids, addresses, random numbers of a library in C) must not decide what "
    "a script computes"
)

Frames = Sequence[FrameValues]


def divergence(frames: Mapping[int, Frames], sides: Sequence[Sequence[int]]) -> list[str]:
    """Return the line at which ranks went apart, and the values there that differ; empty if neither is known.

    frames: of each rank at its error, outermost first. sides: groups of ranks that called the same.
    """
    known = [rank for side in sides for rank in side if frames.get(rank)]
    first = next((rank for rank in known if rank in sides[0]), None)
    other = next((rank for rank in known if rank not in sides[0]), None)
    if first is None or other is None:
        return []
    common = _common(frames[first], frames[other])
    if not common:
        return []
    differing = [_differing({rank: frames[rank] for rank in known}, depth) for depth in range(len(common))]
    everything = {name: text for values in differing for name, text in values.items()}  # inner frames' names win
    branches = _branches(common, frames[first], frames[other])
    for source, branch in branches:
        traced = _traced(source, branch.lineno, _names(_condition(branch)), everything)
        if traced:
            return [f"  they went apart at {source.shown(branch)}", *traced[:MOST], _ADVICE]
    # No condition reads a variable that still differs: show the branches, and whatever differs, from the inside out.
    lines: list[str] = []
    if branches:
        shown = " or ".join(source.shown(branch) for source, branch in branches[:MOST_BRANCHES])
        lines.append(f"  they went apart at {shown}")
    for frame, values in zip(reversed(common), reversed(differing), strict=True):
        lines += _traced(_Source(frame.file), frame.line, list(values), values)
    return [*lines[: 1 + MOST], _ADVICE] if lines else []


def _common(mine: Frames, theirs: Frames) -> list[FrameValues]:
    """Return the frames that both stacks begin with, as in `theirs`, up to the first with different lines."""
    common = []
    for frame, other in zip(mine, theirs, strict=False):
        if (frame.file, frame.function) != (other.file, other.function):
            break
        common.append(other)
        if frame.line != other.line:
            break
    return common


def _differing(frames: Mapping[int, Frames], depth: int) -> dict[str, str]:
    """Return the variables of the frames at this depth whose values differ, with their values in words."""
    variables = {rank: stack[depth].values for rank, stack in frames.items() if depth < len(stack)}
    differing = {}
    for name in dict.fromkeys(name for values in variables.values() for name in values):
        ranks = ranks_by((rank, variables[rank].get(name, "")) for rank in sorted(variables))
        if len(ranks) > 1 and "" not in ranks:  # a rank without the variable is at another line, not of another value
            differing[name] = ", ".join(f"{text} on {name_ranks(group)}" for text, group in ranks.items())
    return differing


def _branches(common: Frames, mine: Frames, theirs: Frames) -> list[tuple[_Source, ast.stmt]]:
    """Return the statements by which ranks may have come to their lines, the likeliest first, with their files."""
    last = len(common) - 1
    here, there = mine[last].line, theirs[last].line
    pairs = [(common[-1].file, here, there)]
    for stack, line in ((mine, there), (theirs, here)):
        if line == AT_END_LINE:  # that rank may have left a function in which the other is
            pairs += [(frame.file, frame.line, line) for frame in stack[last + 1 :]]
    sources = {file: _Source(file) for file, _, _ in pairs}
    return [(sources[file], node) for file, *lines in pairs for node in _branches_between(sources[file], *lines)]


# The source.


class _Source:
    """A file's statements; none if it cannot be read."""

    def __init__(self, file: str) -> None:
        self.name = os.path.basename(file)
        self._lines = linecache.getlines(file)
        try:
            self.tree = ast.parse("".join(self._lines))
        except (SyntaxError, ValueError):
            self.tree = ast.Module([], [])

    def shown(self, node: ast.stmt) -> str:
        """Return `train.py:12: if turn:`."""
        return f"{self.name}:{node.lineno}: {self._lines[node.lineno - 1].strip()}"


def _branches_between(source: _Source, here: int, there: int) -> list[ast.stmt]:
    """Return the statements by which two runs of a function may have come to these lines, the likeliest first."""
    if here == there:
        return []
    statements = [node for node in ast.walk(source.tree) if isinstance(node, ast.stmt)]  # outer ones first
    places = [(node, _block_with(node, here), _block_with(node, there)) for node in statements]
    apart: list[ast.stmt] = [node for node, mine, theirs in places if mine != theirs and isinstance(node, _BRANCHES)]
    branches = sorted(apart, key=lambda node: node.lineno)
    if branches and not isinstance(branches[0], _LOOPS):
        return branches
    # They are in different rounds of a loop, or of the block around both: statements that leave it may be the cause.
    block: Sequence[ast.stmt] = source.tree.body
    if branches:
        block = dict(_blocks(branches[0]))["body"]
    elif around := [(node, mine) for node, mine, theirs in places if mine == theirs and mine]:
        block = dict(_blocks(around[-1][0]))[around[-1][1]]
    skipping = [
        node
        for node in block
        if isinstance(node, ast.If)
        and node not in branches
        and any(isinstance(inner, _LEAVES) for inner in ast.walk(node))
    ]
    return [*branches[:1], *skipping, *branches[1:]]


def _block_with(node: ast.stmt, line: int) -> str | None:
    """Return the name of a statement's block that contains a line; empty for its condition; None: it is elsewhere."""
    if line == AT_END_LINE or not _covers([node], line):
        return None
    return next((name for name, block in _blocks(node) if _covers(block, line)), "")


def _blocks(node: ast.stmt) -> Iterator[tuple[str, Sequence[ast.stmt]]]:
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(node, name, None):
            yield name, block
    for name in ("handlers", "cases"):
        for number, part in enumerate(getattr(node, name, ())):
            yield f"{name} {number}", part.body


def _covers(block: Sequence[ast.stmt], line: int) -> bool:
    return block[0].lineno <= line <= (block[-1].end_lineno or 0)


def _condition(node: ast.stmt) -> ast.AST | None:
    parts = (getattr(node, name, None) for name in ("test", "iter", "subject"))
    return next((part for part in parts if part), None)


def _names(node: ast.AST | None) -> list[str]:
    """Return the variables that an expression reads, `self.step` among them."""
    names = () if node is None else map(_name, ast.walk(node))
    return list(dict.fromkeys(filter(None, names)))


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def _traced(source: _Source, line: int, names: Sequence[str], differing: Mapping[str, str]) -> list[str]:
    """Return the values of these variables that differ, and of those they were computed from, with their lines."""
    seen: set[str] = set()

    def trace(name: str, depth: int) -> list[str]:
        if name in seen or depth > MOST:
            return []
        seen.add(name)
        assignment = _assignment(source.tree, name, line) or _assignment(source.tree, name.partition(".")[0], line)
        inner: list[str] = []
        if assignment is not None:
            read = _names(_condition(assignment) or getattr(assignment, "value", None))
            inner = [text for variable in read for text in trace(variable, depth + 1)]
        if not inner and name not in differing:
            return []
        value = f"{name} is {differing[name]}" if name in differing else f"{name} is computed"
        return [f"  {value}{'' if assignment is None else f': {source.shown(assignment)}'}", *inner]

    return [text for name in names for text in trace(name, 0)]


def _assignment(tree: ast.Module, name: str, line: int) -> ast.stmt | None:
    """Return the last statement before a line that assigns a variable, or the last one at all."""
    function: ast.AST = tree
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _covers([node], line):
            function = node
    for scope in (function, tree):
        assigning = [node for node in ast.walk(scope) if isinstance(node, ast.stmt) and _assigns(node, name)]
        assigning.sort(key=lambda node: node.lineno)
        if assigning:
            before = [node for node in assigning if line == AT_END_LINE or node.lineno <= line]
            return (before or assigning)[-1]
    return None


def _assigns(node: ast.stmt, name: str) -> bool:
    variables = [getattr(node, "target", None), *getattr(node, "targets", ())]
    variables += [item.optional_vars for item in getattr(node, "items", ())]
    return any(_name(inner) == name for variable in filter(None, variables) for inner in ast.walk(variable))
