"""A run of which a report is written at its end: `duoka run --report FILE.html`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from duoka.plan import Plan
from duoka.supervision.status_board import StatusBoard
from duoka.watching.document import write_page
from duoka.watching.history import Event, History
from duoka.watching.page import RunEnd, page
from duoka.watching.record import PublishedRun
from duoka.watching.sample import take


class ReportedRun(PublishedRun):
    """Takes samples while the run goes on, and writes the page when it is closed. say: prints a line."""

    def __init__(self, plan: Plan, path: Path, say: Callable[[str], None], folder: Path | None = None) -> None:
        super().__init__(plan, folder)
        self._report, self._say = path, say
        self._history = History(time.monotonic())
        self._seen: StatusBoard | None = None

    def begin(self, attempt: int, ranks: range) -> StatusBoard:
        self._seen = super().begin(attempt, ranks)
        self._history.begin()
        return self._seen

    def started(self, pids: Sequence[int]) -> None:
        super().started(pids)
        if self.record.attempt:
            self._history.events.append(Event(time.monotonic(), f"restart {self.record.attempt}"))

    def look(self) -> None:
        now = time.monotonic()
        if self._seen is not None and self._history.is_due(now):
            self._history.hear(self._seen.told)
            if all(os.path.exists(f"/proc/{pid}/exe") for pid in self.record.pids):  # the ended have no counters
                self._history.add(take(self.record, self._seen))

    def failed(self, cause: str, report: str = "") -> None:
        super().failed(cause, report)
        self._history.events.append(Event(time.monotonic(), cause, report))

    def close(self) -> None:
        now = time.monotonic()
        steps = None
        if self._seen is not None:
            self._history.hear(self._seen.told)
            steps = min(self._seen.counters(rank).steps for rank in self._seen.ranks)
        self._history.finish()
        super().close()
        try:
            write_page(self._report, page(self.record, self._history, RunEnd(self.record.code, now, steps=steps)))
        except OSError as error:
            self._say(f"the report cannot be written to {self._report}: {error.strerror}")
