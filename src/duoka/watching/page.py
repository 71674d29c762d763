"""The page about a run: written at its end (`duoka run --report`), or served while it goes on (`duoka watch`)."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import nlargest, nsmallest
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from urllib.parse import parse_qs, urlsplit

from duoka.hardware.gpu import Gpu
from duoka.planning.plan import Plan
from duoka.supervision.status_board import StatusBoard
from duoka.system import disk
from duoka.system.messages import duration, in_words, per_second, printable
from duoka.watching.history import History, Point, RunEvent
from duoka.watching.html import Axis, Line, Mark, Segments, area_chart, document, head, line_chart, table
from duoka.watching.progress import MOST_LOGGED, read_position
from duoka.watching.record import PublishedRun, RunRecord, open_board, record_of, take
from duoka.watching.sample import RunSample, parts_shown
from duoka.watching.showing import columns
from duoka.watching.watcher import RunState, RunWatcher, findings, name_on_machines, only_these, worst

MOST_LINES = 8  # ranks in a chart
MOST_ROWS = 64  # ranks in the table
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    code: int | None  # None: it could not be started
    time: float  # CLOCK_MONOTONIC
    words: str = ""  # in place of what the exit code says
    steps: int | None = None  # that all ranks have made in the last attempt; None: as many as at the last look


def page(record: RunRecord, history: History, end: RunEnd, refresh: int = 0, position: str = "") -> str:
    """Return the report of a run.

    refresh: seconds after which browsers load it again; 0: never. position: of the run in its epochs, in words.
    """
    state = _overall(record, history)
    body = [
        *_head(record, history, end, state, position),
        *_notes(state, history),
        _table(state),
        *_charts(record, history, end.time),
    ]
    if history.reader.lines:
        text = escape("\n".join(map(printable, history.reader.lines)))
        body.append(f"<section><h2>Printed last</h2><pre>{text}</pre></section>")
    return document(f"{record.name}: {_how(end)}", body, refresh)


def _overall(record: RunRecord, history: History) -> RunState | None:
    """Return the state over the whole last attempt that has samples; None without one.

    Its rates are those from the first step on: the start is no part of a step.
    """
    samples = next((samples for samples in reversed(history.attempts) if len(samples) > 1), None)
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


def _head(record: RunRecord, history: History, end: RunEnd, state: RunState | None, position: str) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.begun))
    devices = ", ".join(dict.fromkeys(record.devices))
    workers = len(record.devices)
    where = f"{workers} worker{'s' * (workers > 1)} on {devices}"
    if record.others:
        where = f"{sum(record.workers)} workers on {', '.join(dict.fromkeys(record.machines)) or devices}"
    elif record.machine:
        where = f"{where}: {only_these(record)}"
    words = [f"began {when}", f"took {duration(end.time - history.begun)}", where]
    if position:
        words.append(position)
    if record.attempt:
        words.append(f"{record.attempt} restart{'s' * (record.attempt > 1)}")
    if state is not None and state.steps_per_second is not None:
        steps = state.steps if end.steps is None else end.steps
        words.append(f"{steps:,} steps, {in_words(1 / state.steps_per_second)} each")
        if state.samples_per_second is not None:
            words.append(f"{per_second(state.samples_per_second)} samples/s")
    yield head(f"{record.name}: {_how(end)}", words)


def _notes(state: RunState | None, history: History) -> Iterator[str]:
    texts = [] if state is None else [text for text in findings(state) if not text.startswith("fault ")]
    if texts or history.events:
        yield "<section><h2>What stands out</h2><ul>"
        yield from (f"<li>{escape(text)}</li>" for text in texts)
        for event in history.events:  # when it was, and below it what was printed about it, to be opened
            said, report = f"{duration(event.time - history.begun)} {escape(event.text)}", escape(event.report)
            opened = f"<details open><summary>{said}</summary><pre>{report}</pre></details>"
            yield f"<li>{opened if report else said}</li>"
        yield "</ul></section>"
    if state is None:
        yield "<p>The run was too short for two samples, half a second apart.</p>"


def _table(state: RunState | None) -> str:
    if state is None:
        return ""
    shown = columns(state, worst(state, MOST_ROWS))
    rows = zip(*(map(str, column.cells) for column in shown), strict=True)
    note = "" if not state.record.attempt else " of the last attempt"
    note += f": the {MOST_ROWS} that are worst off, the worst first" if len(state.ranks) > MOST_ROWS else ""
    return table(f"The time of each rank{note}", [column.name for column in shown], rows)


def _charts(record: RunRecord, history: History, end: float) -> Iterator[str]:
    """Yield the charts of steps and their parts, ranks' rows, logged values, memory and GPUs, against time."""
    span = history.begun, end
    marks = [Mark(event.time, event.text) for event in history.events]
    ranks = sorted({rank.rank for samples in history.attempts for sample in samples[-1:] for rank in sample.ranks})

    def chart(title: str, named: Mapping[str, Segments], words: Callable[[float], str], note: str = "") -> str:
        styles = ["c0"] * ("a step" in named) + [f"c{at % 8 + 1}" for at in range(len(named))]
        lines = [Line(name, style, segments) for (name, segments), style in zip(named.items(), styles, strict=False)]
        top = max((point.value for line in lines for points in line.segments for point in points), default=0.0)
        return line_chart(title, Axis(*span, top, words(top)), lines, marks, note)

    def by_rank(drawn: Iterable[int], segments: Callable[[int], Segments], of: str = "") -> dict[str, Segments]:
        return {f"{name_on_machines(record, [rank])}{of}": segments(rank) for rank in sorted(drawn)}

    if ranks and any(len(samples) > 1 for samples in history.attempts):
        slowest = nlargest(MOST_LINES, ranks if record.sees_waits else (), history.busy_time)
        busy = by_rank(slowest, lambda rank: history.step_times(rank, busy_only=True), " without waits")
        note = f"The {MOST_LINES} slowest of {len(ranks)} ranks." if len(ranks) > MOST_LINES else ""
        steps = {"a step": history.step_times(ranks[0], busy_only=False), **busy}
        yield chart("Seconds of a step", steps, lambda top: in_words(top) if top else "0", note)
        layers = [
            Line(
                part.name,
                part.page_style,
                [
                    [Point(point.time, getattr(point.parts, part.field)) for point in points]
                    for points in history.parts
                ],
            )
            for part in parts_shown(record.sees_waits)
        ]
        yield area_chart("Parts of the time, mean of all ranks", Axis(*span, 1.0, "100%"), layers, marks)
    shares = by_rank(ranks, history.rows)
    if any(len({point.value for point in points}) > 1 for segments in shares.values() for points in segments):
        yield chart("Rows of each rank", dict(islice(shares.items(), MOST_LINES)), lambda top: f"{top:.0f}")
    yield from _value_charts(history, span, marks)
    if ranks:
        memory = by_rank(nlargest(MOST_LINES, ranks, history.most_memory), history.memory)
        yield chart("Memory of each process", memory, lambda top: f"{top / MIB:,.0f} MiB")
    if history.memory_used:  # of many GPUs those with the most memory in use, and the least busy
        used = {name: values.all() for name, values in history.memory_used.items()}
        names = nlargest(MOST_LINES, used, lambda name: used[name][-1].value)
        memory = {name: [used[name]] for name in sorted(names)}
        yield chart("Memory of each GPU", memory, lambda top: f"{top / GIB:,.1f} GiB")
    if history.utilisation:
        use = {name: values.all() for name, values in history.utilisation.items()}
        names = nsmallest(MOST_LINES, use, lambda name: fmean(point.value for point in use[name]))
        lines = [Line(name, f"c{at % 8 + 1}", [use[name]]) for at, name in enumerate(sorted(names))]
        yield line_chart("Use of each GPU", Axis(*span, 100.0, "100%"), lines, marks)


def _value_charts(history: History, span: tuple[float, float], marks: Sequence[Mark]) -> Iterator[str]:
    for name, values in history.values.items():
        points = [point for point in values.all() if math.isfinite(point.value)]
        if points:
            low, high = min(point.value for point in points), max(point.value for point in points)
            if low == high:
                low, high = low - (abs(low) or 1.0), high + (abs(high) or 1.0)
            axis = Axis(*span, high, f"{high:.4g}", f"{low:.4g}", low)
            ends = [-math.inf, *(event.time for event in history.events), math.inf]  # no line crosses an event
            segments = [[point for point in points if low <= point.time < high] for low, high in pairwise(ends)]
            yield line_chart(name, axis, [Line(f"last: {points[-1].value:.6g}", "c5", segments)], marks)
    if history.reader.leaves_out:
        yield f'<p class="faint">The script logs more than {MOST_LOGGED} values: further names are left out.</p>'


REFRESH = 1  # seconds after which a browser loads the page again


class WatchedRun:
    """The history of a run from now on, and its page."""

    def __init__(self, record: RunRecord) -> None:
        self._record, self.history = record, History(time.monotonic())
        self.history.begin()
        self._board: StatusBoard | None = None
        self._end: RunEnd | None = None
        self._position = ""
        self._lock = threading.Lock()  # the page is made in the threads of requests

    def look(
        self, record: RunRecord, gpus: Mapping[str, Gpu] | None = None, board: StatusBoard | None = None
    ) -> None:
        """Take a sample. record: as it is now. gpus: by the names of their devices. board: of this process."""
        with self._lock:
            self.note(record)
            self._board = board or self._board or open_board(record)  # None before its workers have started
            if self._board is not None:
                self.history.read_output(self._board.script_output)
                if record.is_alive:
                    self.history.add(take(record, self._board))
                used = {name: gpu for name, gpu in (gpus or {}).items() if name in record.devices}
                self.history.look_at(time.monotonic(), used)
                self._position = read_position(self._board, time.monotonic()).words()

    def note(self, record: RunRecord) -> None:
        """Note faults and a restart since the last record."""
        seen = len(self._record.faults)
        for fault, report in zip(record.faults[seen:], record.reports[seen:], strict=True):
            self.history.events.append(RunEvent(time.monotonic(), fault, report))
        if record.attempt != self._record.attempt:
            self.history.begin()
            self.history.events.append(RunEvent(time.monotonic(), f"restart {record.attempt}"))
            self._board = None
        self._record = record

    def end(self, record: RunRecord, without_code: str = "has ended", steps: int | None = None) -> None:
        """Note the end. without_code: words for a run that left no exit code. steps: of all ranks."""
        with self._lock:
            self.note(record)
            self.history.finish()
            self._end = RunEnd(record.code, time.monotonic(), without_code if record.code is None else "", steps)

    def page(self) -> str:
        """Return the page as it is now; browsers load it again until the run has ended."""
        with self._lock:
            if self._end is not None:
                return page(self._record, self.history, self._end)
            return page(self._record, self.history, RunEnd(None, time.monotonic(), "runs"), REFRESH, self._position)


class ReportedRun(PublishedRun):
    """A run of this process that is also watched, and whose page is written at the end. say: prints a line."""

    def __init__(
        self, plan: Plan, path: Path, say: Callable[[str], None], folder: Path | None = None, run: str = ""
    ) -> None:
        self._report, self._say, self._watched = path, say, WatchedRun(record_of(plan, run))
        super().__init__(plan, folder, run)

    def look(self) -> None:
        if self._status is not None and self._watched.history.is_due(time.monotonic()):
            self._watched.look(self.record, board=self._status)

    def _publish(self) -> None:
        super()._publish()
        self._watched.note(self.record)

    def close(self) -> None:
        steps = None
        if self._status is not None:  # before the board goes: what came since the last look
            self._watched.history.read_output(self._status.script_output)
            steps = min(self._status.counters(rank).steps for rank in self._status.ranks)
        super().close()
        self._watched.end(self.record, "did not run", steps)
        try:
            disk.replace_by(self._report, self._watched.page().encode())
        except OSError as error:
            self._say(f"the report cannot be written to {self._report}: {error.strerror}")


LOOPBACK = "127.0.0.1"


@contextmanager
def serving(make: Callable[[], str]) -> Iterator[str]:
    """Serve a page on a free port of the loopback interface, and yield its address, which holds a secret.

    make: returns the page; it is called in other threads.
    """
    token = secrets.token_urlsafe(16)

    class Handler(BaseHTTPRequestHandler):
        """Answers the address with the secret, and no other."""

        def do_GET(self) -> None:
            sent = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
            # Other users of this machine can connect, too.
            if not secrets.compare_digest(sent.encode(), token.encode()):
                self.send_error(403)
                return
            data = make().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")  # the address holds the secret
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Write nothing to the terminal."""

    with ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
        # The interval is how long the end of the command may wait for it.
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{server.server_address[1]}/?token={token}"
        finally:
            server.shutdown()
            thread.join()
