"""Tell programs of which ranks print something else than one device does, and make them small."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from tests.fuzz.program import DEVICE, Event, Played, Program
from tests.fuzz.ranks import ENDED, Ranks, play_alone

NUDGES = 4  # plays on one device with inputs moved by a unit in the last place
MARGIN = 16  # times what these moves do
OVERFLOWS = 1e37  # values of which single precision has hardly any
REFUSALS = ("Refused",)  # loud, and documented as such
_CALLED = re.compile(r"\.(\w+)\(|(\[)")


@dataclass(frozen=True)
class Difference:
    """What ranks did that one device does not. kind: differs, raises, apart (between ranks), ended or refused."""

    kind: str
    text: str
    ranks: str = ""
    at: int = 0  # the event
    by: float = 0.0  # for numbers

    @property
    def silent(self) -> bool:
        return self.kind in ("differs", "apart")


@cache
def _one_device() -> Ranks:
    return Ranks(1, "python")


def play_on_one_device(program: Program, seed: int | None = None) -> Played:
    """Play a program without duoka: in this process, unless that keeps the ranks, its forks, from using a GPU."""
    if DEVICE == "cpu":
        return play_alone(program, seed)
    return _one_device().play((program, seed))[0]


def difference(program: Program, ranks: Ranks, expected: Played | None = None) -> Difference | None:
    """Play a program on one device and on ranks; return the first difference, None if there is none."""
    expected = expected or play_on_one_device(program)
    played = ranks.play(program)
    first = _difference(program, expected, played)
    if first is None or (first.by and _is_rounding(program, ranks, first)):
        return None
    return replace(first, ranks=f"{ranks.strategy} on {ranks.world_size} ranks")


def _is_rounding(program: Program, ranks: Ranks, met: Difference) -> bool:
    """Return whether what differs, beyond what the nudges do, depends on the precision as rounding does."""
    other = program.in_other_precision()
    if other is None:
        return False
    expected, played = play_on_one_device(other), ranks.play(other)
    events = [each.events[met.at].values for each in (expected, *played) if len(each.events) > met.at]
    values = [list(_floats(event)) for event in events]
    if len(values) != 1 + len(played) or len({len(floats) for floats in values}) > 1 or not values[0]:
        return False
    by = max(_distance(values[0], floats) for floats in values[1:])
    return max(by, met.by) > min(by, met.by) * 2**20  # rounding: 2**29 times as much in the one as in the other


def _difference(program: Program, expected: Played, played: list[Played]) -> Difference | None:
    raised = [each for each in played if each.error is not None and each.error[0] != ENDED]
    played = [each for each in played if each.error is None or each.error[0] != ENDED]
    first = played[0]
    for rank, other in enumerate(played):
        if other.error is not None and other.error != expected.error:
            name, text = other.error
            if name.split(" ")[0] in REFUSALS:
                return Difference("refused", text)
            if expected.error is None or other.error[0] != expected.error[0]:
                return Difference("ended", f"rank {rank}: {name}: {text}")
    events = first.events
    refused = next(
        (number for number, event in enumerate(events) if event.values in [(name,) for name in REFUSALS]), None
    )
    if refused is not None:
        events = events[:refused]
    for rank, other in enumerate(played):
        for event, its in zip(events, other.events, strict=False):
            if repr((event.line, event.values)) != repr((its.line, its.values)):
                return Difference("apart", f"rank 0: {_shown(event)}\nrank {rank}: {_shown(its)}")
    rounding: list[tuple[int, Event, Event]] = []
    wanted: tuple[Event, ...] = expected.events
    for number, (right, shown) in enumerate(zip(wanted, events, strict=False)):
        if any(OVERFLOWS < abs(value) < math.inf for value in _floats(right.values)):
            return None  # rounding decides what overflows
        if right.line != shown.line or not _same_form(right.values, shown.values):
            if any(p.events[number : number + 1] and not _alike(p.events[number], right) for p in _nudged(program)):
                return None  # rounding decides what is printed
            raising = right.line != shown.line or any(
                isinstance(v, tuple) and len(v) == 1 and isinstance(v[0], str) for v in (right.values, shown.values)
            )
            return Difference("raises" if raising else "differs", f"python: {_shown(right)}\nranks:  {_shown(shown)}")
        if repr(right.values) != repr(shown.values):
            rounding.append((number, right, shown))
    if refused is not None:
        return Difference("refused", first.events[refused].text)
    if len(wanted) != len(events) and not (raised and expected.error):
        extra = _shown(max(wanted, events, key=len)[min(len(wanted), len(events))])
        text = f"python prints {len(wanted)} times, ranks {len(events)} times; the first that is not of both: {extra}"
        return Difference("raises", text)
    nudged = _nudged(program) if rounding else []
    for number, right, shown in rounding:
        near = [other.events[number].values for other in nudged if len(other.events) > number]
        by, allowed = _beyond(right.values, shown.values, near)
        if by > allowed:
            text = (
                f"python: {_shown(right)}\nranks:  {_shown(shown)}\nby {by:.3g}; rounding does {allowed:.3g} at most"
            )
            return Difference("differs", text, at=number, by=by)
    return None


def _nudged(program: Program) -> list[Played]:
    return [play_on_one_device(program, seed) for seed in range(NUDGES)]


def _alike(one: Event, other: Event) -> bool:
    return one.line == other.line and _same_form(one.values, other.values)


def _same_form(one: Any, other: Any) -> bool:
    """Return whether two printed values are equal but for floats."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isnan(one) == math.isnan(other) and (one == other or not (math.isinf(one) or math.isinf(other)))
    if isinstance(one, complex) and isinstance(other, complex):
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same_form, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_form(one[name], other[name]) for name in one)
    return type(one) is type(other) and one == other


def _beyond(one: Any, other: Any, near: list[Any]) -> tuple[float, float]:
    """Return by how much values differ, and what rounding may do.

    near: the values with inputs moved by a unit in the last place.
    """
    base, values = (list(_floats(values)) for values in (one, other))
    moved = [list(_floats(values)) for values in near]
    if any(len(values) != len(base) for values in moved):
        return 0.0, 0.0  # rounding decides what is printed
    does = max((_distance(base, values) for values in moved), default=0)
    size = max((abs(value) for value in base if math.isfinite(value)), default=0.0)
    unit = math.ulp(size) * (2**29 if all(map(_is_single, base)) else 1) if size else 0.0
    return _distance(base, values), MARGIN * max(does, unit)


def _distance(values: list[float], others: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(values, others, strict=True) if math.isfinite(a - b)), default=0)


def _is_single(value: float) -> bool:
    """Return whether a number has single precision."""
    return torch.tensor(value, dtype=torch.float32).item() == value or not math.isfinite(value)


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, complex):
        yield from (value.real, value.imag)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _floats(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _floats(one)


def _shown(event: Event) -> str:
    return " ".join(map(str, event.values))[:600] + (f" ({event.text})" if event.text else "")


def smallest(program: Program, fails: Callable[[Program], bool], most: int = 400) -> Program:
    """Return a program with fewer statements that fails, too. most: programs to try."""
    while True:
        for smaller in program.smaller():
            most -= 1
            if most < 0:
                return program
            if smaller != program and fails(smaller):
                program = smaller
                break
        else:
            return program


def script(program: Program) -> str:
    """Return a program as a script to paste, with a `try` around what raises only."""
    header, rest = program.source()
    raising: set[int] = {event.line for event in play_on_one_device(program).events if len(event.values) == 1}
    lines = (header + rest).split("\n")
    guarded = {
        statement
        for statement in (*program.body, *program.end)
        if any("print(type(error)" in lines[line - 1] and _covers(lines, line, statement) for line in raising)
    }
    return "".join(program.source(lambda statement: statement in guarded))


def _covers(lines: list[str], line: int, statement: str) -> bool:
    """Return whether the `except` above a line belongs to a statement."""
    count = statement.count("\n") + 1
    found = "\n".join(text.strip() for text in lines[line - 2 - count : line - 2])
    return found == "\n".join(text.strip() for text in statement.split("\n"))


def calls(program: Program) -> tuple[str, ...]:
    """Return the functions that a program calls, to tell one fault from another."""
    text = "\n".join(statement for statement in program.body if not statement.startswith("print("))
    return tuple(sorted({a or "[]" for a, b in _CALLED.findall(text)}))
