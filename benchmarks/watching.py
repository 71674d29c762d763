"""What it costs a step of 1 ms that every rank tells where it is, and that somebody watches it."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.runs import BIN, ROUNDS, SCRIPTS, Samples, duoka, in_turn, output, surroundings
from benchmarks.table import Row

STEP = 1000.0  # microseconds
PHASE = 5.0  # seconds in which the run is watched, and then is not
SETTLING = 0.5  # seconds at the begin of each that do not count
PHASES = 4  # of each in a round


def measure(quick: bool) -> Iterator[Row]:
    """Measure a step of 1 ms with and without recording it for `duoka watch`, and a run with and without it."""
    rounds = 1 if quick else ROUNDS
    times = _in_turn(("board", "watcher"), rounds) | _in_turn(("recorder", "silent"), 2 * rounds)
    alone = Samples((STEP,), "us")
    yield Row(
        "a step of 1 ms, recorded on the status board (plain), against the step alone", times["board"], alone, 1.01
    )
    yield Row(
        "a step of 1 ms, recorded by torch's flight recorder (distributed), against the same without",
        times["recorder"],
        times["silent"],
        1.01,
    )
    yield Row(
        "a step of 1 ms and the watching process's time for it, against the step alone", times["watcher"], alone, 1.01
    )
    watched, unwatched = _watched_in_turn(1 if quick else rounds * PHASES)
    yield Row(
        "a step of 1 ms on one device with `duoka watch --page` open, against the same run unwatched",
        watched,
        unwatched,
        1.01,
    )


def _in_turn(ways: Sequence[str], rounds: int) -> dict[str, Samples]:
    return in_turn({how: lambda how=how: _step_that_tells(how) for how in ways}, rounds, "us", warm_up=False)


def _step_that_tells(how: str) -> float:
    return STEP + float(output([BIN / "python", SCRIPTS / "telling.py", how]))


def _watched_in_turn(phases: int) -> tuple[Samples, Samples]:
    """Measure one run that is watched and not watched in turn: `duoka watch` goes on, and is stopped."""
    with _run() as (process, lines), _page(process.pid) as (watch, address):
        spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(phases):
            for is_watched in (True, False):
                os.kill(watch, signal.SIGCONT if is_watched else signal.SIGSTOP)
                time.sleep(SETTLING)
                begin = time.monotonic()
                while time.monotonic() < begin + PHASE:
                    if is_watched:
                        urllib.request.urlopen(address, timeout=30).read()  # as a browser does
                    time.sleep(1.0)
                spans[is_watched].append((begin, begin + PHASE))
        os.kill(watch, signal.SIGCONT)
        blocks = [tuple(map(float, line.split())) for line in lines.read_text().splitlines()]
    found = {
        is_watched: Samples(
            tuple(
                statistics.median(step for when, step in blocks if begin + 0.25 < when < end) for begin, end in those
            ),
            "us",
        )
        for is_watched, those in spans.items()
    }
    return found[True], found[False]


@contextmanager
def _run() -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Yield a run on one device that makes steps, and the file into which it prints how long they take."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        with lines.open("wb") as file:
            words = duoka(1, "--threads", "1", SCRIPTS / "watched.py")
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=file, env=surroundings())
            try:
                while len(lines.read_bytes().splitlines()) < 8:
                    time.sleep(0.1)
                yield process, lines
            finally:
                process.communicate(b"end\n")


@contextmanager
def _page(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the process that serves the page about a run, and the address."""
    words = [BIN / "duoka", "watch", "--page", str(pid)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=surroundings(), text=True) as process:
        assert process.stdout is not None
        match = re.match(r"http\S+", process.stdout.readline())
        assert match is not None
        try:
            yield process.pid, match[0]
        finally:
            process.terminate()
