"""The report of a run: one page of HTML that needs nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest, nsmallest
from html import escape
from itertools import pairwise
from statistics import fmean

from duoka.system.messages import duration, in_words, per_second, printable
from duoka.watching.charts import Axis, Line, Mark, Segments, area_chart, line_chart
from duoka.watching.document import document, head, table
from duoka.watching.findings import findings, name_places, only_these
from duoka.watching.history import History, Point, RunEvent
from duoka.watching.output_reader import MOST_LOGGED
from duoka.watching.parts import parts_shown
from duoka.watching.record import RunRecord
from duoka.watching.sample import RunSample
from duoka.watching.watcher import RunState, RunWatcher, worst

MOST_LINES = 8  # ranks in a chart
MOST_ROWS = 64  # ranks in the table
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class RunEnd:
    """How a run ended. code: its exit code; None: it could not be started. time: CLOCK_MONOTONIC.

    words: in place of what the exit code says. steps: that all ranks have made in the last attempt; None: as many as
    at the last look.
    """

    code: int | None
    time: float
    words: str = ""
    steps: int | None = None


def page(record: RunRecord, history: History, end: RunEnd, refresh: int = 0, place: str = "") -> str:
    """Return the report of a run.

    refresh: seconds after which browsers load it again; 0: never. place: of the run in its epochs, in words.
    """
    state = _overall(record, history)
    marks = [Mark(event.time, event.text) for event in history.events]
    span = history.begun, end.time
    charts = [
        *_step_charts(record, history, span, marks),
        *_value_charts(history, span, marks),
        *_memory_chart(record, history, span, marks),
        *_gpu_charts(history, span, marks),
    ]
    body = [
        *_head(record, history, end, state, place),
        *_notes(state, history),
        _table(state),
        *charts,
        *_last_lines(history),
    ]
    return document(f"{record.name}: {_how(end)}", body, refresh)


def _overall(record: RunRecord, history: History) -> RunState | None:
    """Return the state over the whole last attempt that has samples; None without one.

    Its rates are those from the first step on: the start is no part of a step.
    """
    samples = next((one for one in reversed(history.attempts) if len(one) > 1), None)
    if samples is None:
        return None
    state = _state(record, samples)
    going = [sample for sample in samples if sample.steps]
    if len(going) < 2:
        return state
    rates = _state(record, (going[0], going[-1]))
    return replace(state, steps_per_second=rates.steps_per_second, samples_per_second=rates.samples_per_second)


def _state(record: RunRecord, samples: Iterable[RunSample]) -> RunState:
    watcher = RunWatcher(record, math.inf)
    for sample in samples:
        watcher.add(sample)
    return watcher.state({})


def _how(end: RunEnd) -> str:
    if end.words:
        return end.words
    if end.code is None:
        return "did not run"
    return "ended well" if end.code == 0 else f"ended with exit code {end.code}"


def _head(record: RunRecord, history: History, end: RunEnd, state: RunState | None, place: str) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.begun))
    devices = ", ".join(dict.fromkeys(record.devices))
    workers = len(record.devices)
    where = f"{workers} worker{'s' * (workers > 1)} on {devices}"
    if record.others:
        where = f"{sum(record.workers)} workers on {', '.join(dict.fromkeys(record.machines)) or devices}"
    elif record.machine:
        where = f"{where}: {only_these(record)}"
    words = [f"began {when}", f"took {duration(end.time - history.begun)}", where]
    if place:
        words.append(place)
    if record.attempt:
        words.append(f"{record.attempt} restart{'s' * (record.attempt > 1)}")
    if state is not None and state.steps_per_second is not None:
        steps = state.steps if end.steps is None else end.steps
        words.append(f"{steps:,} steps, {in_words(1 / state.steps_per_second)} each")
        if state.samples_per_second is not None:
            words.append(f"{per_second(state.samples_per_second)} samples/s")
    yield head(f"{record.name}: {_how(end)}", words)


def _notes(state: RunState | None, history: History) -> Iterator[str]:
    """Yield what stands out, and the events with their times."""
    found = [] if state is None else [text for text in findings(state) if not text.startswith("fault ")]
    if found or history.events:
        yield "<section><h2>What stands out</h2><ul>"
        yield from (f"<li>{escape(text)}</li>" for text in found)
        yield from (_event(event, history.begun) for event in history.events)
        yield "</ul></section>"
    if state is None:
        yield "<p>The run was too short for two samples, half a second apart.</p>"


def _event(event: RunEvent, begun: float) -> str:
    """Return when an event was, and below it what was printed about it, to be opened."""
    said = f"{duration(event.time - begun)} {escape(event.text)}"
    if not event.report:
        return f"<li>{said}</li>"
    return f"<li><details open><summary>{said}</summary><pre>{escape(event.report)}</pre></details></li>"


def _last_lines(history: History) -> Iterator[str]:
    """Yield what the script has printed last."""
    if history.reader.lines:
        text = escape("\n".join(map(printable, history.reader.lines)))
        yield f"<section><h2>Printed last</h2><pre>{text}</pre></section>"


def _table(state: RunState | None) -> str:
    if state is None:
        return ""
    shown = parts_shown(state.record.sees_waits)
    has_machines = bool(state.record.others and state.record.machines)
    rows = []
    for one in worst(state, MOST_ROWS):
        cells = [str(one.sample.rank), *([one.machine.removeprefix("machine ")] if has_machines else []), one.device]
        cells += ["" if one.parts is None else f"{getattr(one.parts, part.field):.0%}" for part in shown]
        cells.append("" if one.cores is None else f"{one.cores:.1f}")
        cells.append(f"{one.sample.memory / MIB:,.0f}" if one.sample.is_known else "")
        rows.append(cells)
    note = "" if not state.record.attempt else " of the last attempt"
    note += f": the {MOST_ROWS} that are worst off, the worst first" if len(state.ranks) > MOST_ROWS else ""
    places = ("rank", "machine", "device") if has_machines else ("rank", "device")
    return table(f"The time of each rank{note}", (*places, *(part.column for part in shown), "cores", "MiB"), rows)


def _step_charts(
    record: RunRecord, history: History, span: tuple[float, float], marks: Sequence[Mark]
) -> Iterator[str]:
    """Yield the charts of steps and their parts."""
    ranks = _ranks(history)
    if not ranks or all(len(samples) < 2 for samples in history.attempts):
        return
    whole = history.step_times(ranks[0], own=False)
    drawn = sorted(nlargest(MOST_LINES, ranks if record.sees_waits else (), history.busy_time))
    lines = [Line("a step", "c0", whole)]
    for place, rank in enumerate(drawn):
        own = history.step_times(rank, own=True)
        lines.append(Line(f"{name_places(record, [rank])} without waits", f"c{place % 8 + 1}", own))
    top = _top(line.segments for line in lines)
    note = f"The {MOST_LINES} slowest of {len(ranks)} ranks." if len(ranks) > MOST_LINES else ""
    yield line_chart("Seconds of a step", Axis(*span, top, in_words(top) if top else "0"), lines, marks, note)
    yield _parts_chart(record, history, span, marks)


def _ranks(history: History) -> list[int]:
    return sorted({one.rank for samples in history.attempts for sample in samples[-1:] for one in sample.ranks})


def _memory_chart(
    record: RunRecord, history: History, span: tuple[float, float], marks: Sequence[Mark]
) -> Iterator[str]:
    ranks = _ranks(history)
    if not ranks:
        return
    most = sorted(nlargest(MOST_LINES, ranks, history.most_memory))
    lines = [
        Line(name_places(record, [rank]), f"c{place % 8 + 1}", history.memory(rank))
        for place, rank in enumerate(most)
    ]
    top = _top(line.segments for line in lines)
    yield line_chart("Memory of each process", Axis(*span, top, f"{top / MIB:,.0f} MiB"), lines, marks)


def _gpu_charts(history: History, span: tuple[float, float], marks: Sequence[Mark]) -> Iterator[str]:
    """Yield the charts of the GPUs: of many, those with the most memory in use, and the least busy."""
    memory = {name: values.all() for name, values in history.memory_used.items()}
    if memory:
        lines = _lines(nlargest(MOST_LINES, memory, lambda name: memory[name][-1].value), memory)
        top = _top(line.segments for line in lines)
        yield line_chart("Memory of each GPU", Axis(*span, top, f"{top / GIB:,.1f} GiB"), lines, marks)
    used = {name: values.all() for name, values in history.utilisation.items()}
    if used:
        lines = _lines(nsmallest(MOST_LINES, used, lambda name: fmean(one.value for one in used[name])), used)
        yield line_chart("Use of each GPU", Axis(*span, 100.0, "100%"), lines, marks)


def _lines(names: Sequence[str], values: Mapping[str, Sequence[Point]]) -> list[Line]:
    return [Line(name, f"c{place % 8 + 1}", [values[name]]) for place, name in enumerate(sorted(names))]


def _parts_chart(record: RunRecord, history: History, span: tuple[float, float], marks: Sequence[Mark]) -> str:
    layers = [
        Line(
            part.name,
            part.page_style,
            [[Point(one.time, getattr(one.parts, part.field)) for one in points] for points in history.parts],
        )
        for part in parts_shown(record.sees_waits)
    ]
    return area_chart("Parts of the time, mean of all ranks", Axis(*span, 1.0, "100%"), layers, marks)


def _value_charts(history: History, span: tuple[float, float], marks: Sequence[Mark]) -> Iterator[str]:
    """Yield a chart for each name that the script has logged."""
    for name, values in history.values.items():
        points = [one for one in values.all() if math.isfinite(one.value)]
        if points:
            low, high = min(one.value for one in points), max(one.value for one in points)
            if low == high:
                low, high = low - (abs(low) or 1.0), high + (abs(high) or 1.0)
            axis = Axis(*span, high, f"{high:.4g}", f"{low:.4g}", low)
            segments = _between(points, [event.time for event in history.events])
            yield line_chart(name, axis, [Line(f"last: {points[-1].value:.6g}", "c5", segments)], marks)
    if history.reader.leaves_out:
        yield f'<p class="faint">The script logs more than {MOST_LOGGED} values: further names are left out.</p>'


def _between(points: Sequence[Point], times: Sequence[float]) -> Segments:
    """Return the points in segments that do not cross these times."""
    ends = [-math.inf, *times, math.inf]
    return [[one for one in points if low <= one.time < high] for low, high in pairwise(ends)]


def _top(of_lines: Iterator[Segments]) -> float:
    return max((one.value for segments in of_lines for points in segments for one in points), default=0.0)
