"""Format the state of runs: tables for the terminal, or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from duoka.system.messages import duration, in_words, per_second, printable
from duoka.watching.sample import PARTS, Part, parts_shown
from duoka.watching.watcher import RankState, RunState, findings, name_on_machines, only_these, worst

GIB = 1 << 30
MOST = 16  # ranks in a table
SHOWN_LINES = 3  # of those that the script printed last
SHOWN_VALUES = 16  # the first ones
BAR = 12  # characters for the parts of a step


def as_tables(states: Sequence[RunState], width: int) -> Group:
    """Return, for each run, a headline, the table of its ranks, and notes: findings, logged values, last output.

    width: of the terminal; the tables have the columns for which there is room.
    """
    return Group(*(part for state in states for part in (_headline(state), _table(state, width), _notes(state))))


def _headline(state: RunState) -> Text:
    record = state.record
    words = [f"{printable(record.name)} (pid {record.pid})", f"{duration(state.seconds)}", f"step {state.steps:,}"]
    if state.position.words():
        words.append(state.position.words())
    if state.steps_per_second is not None:
        words.append(f"{per_second(state.steps_per_second)} steps/s ({in_words(1 / state.steps_per_second)} each)")
    if state.samples_per_second is not None:
        words.append(f"{per_second(state.samples_per_second)} samples/s")
    if record.machine:
        words.append(only_these(record))
    if record.attempt:
        words.append(f"restarted {record.attempt} time{'s' * (record.attempt > 1)}")
    if state.slowest is not None:
        rank, often = state.slowest
        words.append(f"slowest: {name_on_machines(record, [rank])}, in {often:.0%} of readings")
    return Text("  ".join(words), style="bold")


@dataclass(frozen=True)
class Column:
    """A column. cells: of all ranks. last: the larger, the earlier it is left out in a narrow terminal; 0: never."""

    name: str
    cells: Sequence[str | Text]
    last: int = 0
    style: str = ""
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        return max([len(self.name), *map(len, self.cells)]) + 2  # with the room between columns


def _table(state: RunState, width: int) -> Table:
    ranks = worst(state, MOST)
    shown = columns(state, ranks)
    device = [column.name for column in shown].index("device")
    shown.insert(device + 1, Column("", [_bar(rank) for rank in ranks], 6, justify="left"))
    while sum(column.width for column in shown) > width and any(column.last for column in shown):
        shown.remove(max(shown, key=lambda column: column.last))
    table = Table(pad_edge=False, box=None)
    for column in shown:
        table.add_column(column.name, justify=column.justify, style=column.style, no_wrap=True)
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def columns(state: RunState, ranks: Sequence[RankState]) -> list[Column]:
    """Return the columns of a table of these ranks, for the terminal and for the page."""

    def column(name: str, cell: Callable[[RankState], str], last: int = 0, style: str = "") -> Column:
        return Column(name, [printable(cell(rank)) for rank in ranks], last, style)

    def fraction(part: Part) -> Callable[[RankState], str]:
        return lambda rank: "" if rank.parts is None else f"{getattr(rank.parts, part.field):.0%}"

    shown = [column("rank", lambda rank: str(rank.sample.rank))]
    if state.record.others and state.record.machines:
        shown.append(column("machine", lambda rank: rank.machine.removeprefix("machine "), 5))
    shown.append(column("device", lambda rank: rank.sample.device, 5))
    shown[1:] = [replace(left, justify="left") for left in shown[1:]]
    for at, part in enumerate(parts_shown(state.record.sees_waits)):
        shown.append(column(part.column, fraction(part), max(0, at - 2), part.style))
    if state.has_uneven_rows:
        shown.append(column("rows", lambda rank: str(rank.sample.rows), 2))
        shown.append(column("a row", lambda rank: in_words(row) if (row := rank.sample.seconds_of_row) else "", 3))
    shown.append(column("cores", lambda rank: "" if rank.cores is None else f"{rank.cores:.1f}", 4))
    shown.append(
        column("memory", lambda rank: f"{rank.sample.memory / GIB:.2f} GiB" if rank.sample.is_known else "", 3)
    )
    uses = column("device use", _device_use, 7)
    return [*shown, uses] if any(uses.cells) else shown


def _bar(rank: RankState) -> Text:
    bar, total, end = Text(), 0.0, 0
    for part in PARTS if rank.parts is not None else ():
        total += getattr(rank.parts, part.field)
        begin, end = end, round(total * BAR)  # rounded widths would not add up to BAR
        bar.append(("░" if part.field == "rest" else "█") * (end - begin), style=part.style)
    return bar


def _device_use(rank: RankState) -> str:
    if rank.gpu is None:
        return ""
    use = "" if rank.gpu.utilisation is None else f"{rank.gpu.utilisation}%"
    memory = "" if rank.gpu.used is None else f"{rank.gpu.used / GIB:.1f}/{rank.gpu.memory / GIB:.1f} GiB"
    return ", ".join(filter(None, [use, memory]))


def _notes(state: RunState) -> Text:
    lines = [f"  {printable(finding)}" for finding in findings(state)]
    if state.values:
        shown = [f"{printable(name)} {value:.6g}" for name, value in islice(state.values.items(), SHOWN_VALUES)]
        if len(state.values) > SHOWN_VALUES:
            shown.append(f"and {len(state.values) - SHOWN_VALUES} more values; --json has them")
        lines.append("  " + "  ".join(shown))
    lines += [f"  | {printable(line)}" for line in state.lines[-SHOWN_LINES:]]
    if len(state.ranks) > MOST:
        lines.append(f"  the {MOST} of {len(state.ranks)} ranks that are worst off, the worst first; --json has all")
    if not state.ranks:
        lines.append("  its workers have not started yet")
    return Text("\n".join([*lines, ""]))


def as_data(state: RunState) -> dict[str, Any]:
    """Return the state as plain data; seconds, bytes and fractions; None if unknown."""
    record, position = state.record, state.position
    bar = position.bar and dict(zip(("name", "done", "total"), position.bar, strict=True))
    return {
        "event": "look",
        "pid": record.pid,
        "name": record.name,
        "devices": list(record.devices),
        "begun": record.begun,
        "seconds": state.seconds,
        "machine": record.machine,
        "machines": list(record.machines),
        "attempt": record.attempt,
        "faults": list(record.faults),
        "steps": state.steps,
        "steps_per_second": state.steps_per_second,
        "samples_per_second": state.samples_per_second,
        "slowest": None if state.slowest is None else {"rank": state.slowest[0], "often": state.slowest[1]},
        "ranks": [_rank_data(rank, state.record.sees_waits) for rank in state.ranks],
        "findings": findings(state),
        "position": {**asdict(position), "bar": bar, "words": position.words()},
        "values": {name: value if math.isfinite(value) else None for name, value in state.values.items()},
        "lines": list(state.lines),
    }


def _rank_data(rank: RankState, sees_waits: bool) -> dict[str, Any]:
    parts = None if rank.parts is None else asdict(rank.parts)
    if parts is not None and not sees_waits:
        parts["waiting"] = None
    gpu = rank.gpu and {"memory": rank.gpu.memory, "used": rank.gpu.used, "utilisation": rank.gpu.utilisation}
    return {
        "rank": rank.sample.rank,
        "pid": rank.sample.pid or None,
        "machine": rank.machine or None,
        "silent": rank.silent,
        "device": rank.sample.device,
        "steps": rank.sample.steps,
        "parts": parts,
        "cores": rank.cores,
        "memory": rank.sample.memory,
        "rows": rank.sample.rows or None,
        "seconds_of_row": rank.sample.seconds_of_row or None,
        "gpu": gpu,
        "collective": rank.sample.inside or None,
        "collective_seconds": rank.sample.since if rank.sample.inside else None,
    }


def end_as_data(state: RunState) -> dict[str, Any]:
    """Return the end of a run as plain data. state: the last one, with the record at the end."""
    record = state.record
    return {
        "event": "end",
        "pid": record.pid,
        "steps": state.steps,
        "code": record.code,
        "faults": list(record.faults),
    }


def end_in_words(state: RunState) -> str:
    """Describe the end of a run. state: the last one, with the record at the end."""
    record = state.record
    how = f" with exit code {record.code}" if record.code else ""
    why = f": {record.faults[-1]}" if record.code and record.faults else ""
    return printable(f"{record.name} (pid {record.pid}) has ended after step {state.steps:,}{how}{why}")


def as_line(data: dict[str, Any]) -> str:
    """Return one line of JSON."""
    return json.dumps(data, allow_nan=False, ensure_ascii=False)
