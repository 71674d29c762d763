"""A run of which a report is written at its end: `duoka run --report FILE.html`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from duoka.plan import Plan
from duoka.supervision.status_board import StatusBoard
from duoka.watching.document import write_page
from duoka.watching.history import History, RunEvent
from duoka.watching.page import RunEnd, page
from duoka.watching.record import PublishedRun


class ReportedRun(PublishedRun):
    """Takes samples while the run goes on, and writes the page when it is closed. say: prints a line."""

    def __init__(
        self, plan: Plan, path: Path, say: Callable[[str], None], folder: Path | None = None, run: str = ""
    ) -> None:
        super().__init__(plan, folder, run)
        self._report, self._say = path, say
        self._history = History(time.monotonic())

    def begin(self, attempt: int, ranks: range) -> StatusBoard:
        self._history.begin()
        return super().begin(attempt, ranks)

    def started(self, pids: Sequence[int]) -> None:
        super().started(pids)
        if self.record.attempt:
            self._history.events.append(RunEvent(time.monotonic(), f"restart {self.record.attempt}"))

    def look(self) -> None:
        now = time.monotonic()
        if self._status is not None and self._history.is_due(now):
            self._history.read_output(self._status.script_output)
            if (sample := self.sample()) is not None:
                self._history.add(sample)

    def failed(self, cause: str, report: str = "") -> None:
        super().failed(cause, report)
        self._history.events.append(RunEvent(time.monotonic(), cause, report))

    def close(self) -> None:
        now = time.monotonic()
        steps = None
        if self._status is not None:
            self._history.read_output(self._status.script_output)
            steps = min(self._status.counters(rank).steps for rank in self._status.ranks)
        self._history.finish()
        super().close()
        try:
            write_page(self._report, page(self.record, self._history, RunEnd(self.record.code, now, steps=steps)))
        except OSError as error:
            self._say(f"the report cannot be written to {self._report}: {error.strerror}")
