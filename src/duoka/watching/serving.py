"""A page about a run that goes on, served on this machine only: `duoka watch --page`."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from duoka.devices.gpu import Gpu
from duoka.supervision.status_board import StatusBoard
from duoka.watching.history import History, RunEvent
from duoka.watching.page import RunEnd, page
from duoka.watching.place import read_place
from duoka.watching.record import RunRecord, open_board
from duoka.watching.sample import take

LOOPBACK = "127.0.0.1"
REFRESH = 1  # seconds after which a browser loads the page again


class WatchedRun:
    """The history of a run of another process, from now on."""

    def __init__(self, record: RunRecord) -> None:
        self._record, self._history = record, History(time.monotonic())
        self._history.begin()
        self._board: StatusBoard | None = None
        self._over: float | None = None
        self._place = ""
        self._lock = threading.Lock()  # the page is made in the threads of requests

    def look(self, record: RunRecord, gpus: Mapping[str, Gpu] | None = None) -> None:
        """Take a sample. record: of the run as it is now. gpus: by the names of their devices."""
        with self._lock:
            self._note_faults(record)
            before, self._record = self._record, record
            if record.attempt != before.attempt:
                self._history.begin()
                self._history.events.append(RunEvent(time.monotonic(), f"restart {record.attempt}"))
                self._board = None
            if self._board is None and record.has_begun:
                self._board = open_board(record)
            if self._board is not None:
                self._history.add(take(record, self._board))
                self._history.read_output(self._board.script_output)
                used = {name: gpu for name, gpu in (gpus or {}).items() if name in record.devices}
                self._history.look_at(time.monotonic(), used)
                self._place = read_place(self._board, time.monotonic()).words()

    def end(self, record: RunRecord) -> None:
        """Note that the run has ended. record: as it was then."""
        with self._lock:
            self._over = time.monotonic()
            self._note_faults(record)
            self._record = record
            self._history.finish()

    def _note_faults(self, record: RunRecord) -> None:
        seen = len(self._record.faults)
        for fault, report in zip(record.faults[seen:], record.reports[seen:], strict=True):
            self._history.events.append(RunEvent(time.monotonic(), fault, report))

    def page(self) -> str:
        """Return the page as it is now; browsers load it again until the run has ended."""
        with self._lock:
            if self._over is not None:
                words = "has ended" if self._record.code is None else ""
                return page(self._record, self._history, RunEnd(self._record.code, self._over, words))
            return page(self._record, self._history, RunEnd(None, time.monotonic(), "runs"), REFRESH, self._place)


@contextmanager
def serving(make: Callable[[], str]) -> Iterator[str]:
    """Serve a page on a free port of the loopback interface, and yield its address, which holds a secret.

    make: returns the page; it is called in other threads.
    """
    token = secrets.token_urlsafe(16)

    class Handler(BaseHTTPRequestHandler):
        """Answers the address with the secret, and no other."""

        def do_GET(self) -> None:
            """Send the page."""
            given = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
            if not secrets.compare_digest(given.encode(), token.encode()):
                self.send_error(403)
                return
            data = make().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Write nothing to the terminal."""

    with ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{server.server_address[1]}/?token={token}"
        finally:
            server.shutdown()
            thread.join()
