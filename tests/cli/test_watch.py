from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from duoka.cli import main
from duoka.cli import watch as module
from duoka.supervision.status_board import StatusBoard
from duoka.watching import record
from duoka.watching.record import PublishedRun
from tests.launchers.made import plan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "runtime_folder", lambda: tmp_path)
    monkeypatch.setattr(module, "STEP", 0.05)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Iterator[tuple[PublishedRun, StatusBoard]]:
    """A run of this process with two ranks, which makes a step."""
    found = PublishedRun(plan())
    board = found.begin(0, range(2))
    found.started([os.getpid()] * 2)
    for rank in range(2):
        board.slot(rank).step(1)
    yield found, board
    found.close()


def test_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch"]) == 0
    assert capsys.readouterr().out == f"{module.NOTHING}\n"
    assert main(["watch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"event": "nothing"}
    assert main(["watch", "1"]) == 2
    assert "PID must be that of a running `duoka run` of yours, but is 1" in capsys.readouterr().err
    assert main(["watch", "--page"]) == 2
    assert "nothing runs" in capsys.readouterr().err
    assert main(["watch", "--page", "--json"]) == 2
    assert "--page excludes --json and --once" in capsys.readouterr().err


def test_one_look(run: tuple[PublishedRun, StatusBoard], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--once"]) == 0
    title, _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert re.match(rf"train.py \(pid {os.getpid()}\)  0:0\d  step 1$", title)
    assert [line.split()[:2] for line in (first, second)] == [["0", "CPU"], ["1", "CPU"]]


def test_lines_until_the_end(run: tuple[PublishedRun, StatusBoard], capsys: pytest.CaptureFixture[str]) -> None:
    published, _ = run

    def end_it() -> None:
        published.failed("rank 1 was killed")
        published.ended(3)
        published.close()

    end = threading.Timer(0.3, end_it)
    end.start()
    assert main(["watch", "--json", str(os.getpid())]) == 0
    end.join()
    *looks, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {look["event"] for look in looks} == {"look"}
    assert last == {"event": "end", "pid": os.getpid(), "steps": 1, "code": 3, "faults": ["rank 1 was killed"]}


def test_a_run_in_the_commands_own_process(capsys: pytest.CaptureFixture[str]) -> None:
    alone = PublishedRun(plan(devices=plan().devices[:1]))
    alone.begin(0, range(1)).slot(0).step(7)
    alone.started([os.getpid()])
    assert main(["watch", "--once", "--json"]) == 0
    alone.close()
    look: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert look["steps"] == 7
    assert look["ranks"][0]["parts"]["waiting"] is None
    assert look["ranks"][0]["memory"] > 1 << 20


WATCH = """
import pathlib, sys
from duoka.cli import main
from duoka.watching import record
record.runtime_folder = lambda: pathlib.Path(sys.argv[1])
sys.exit(main(["watch"]))
"""


def test_in_a_terminal(run: tuple[PublishedRun, StatusBoard], folder: Path) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "24"}
    words = [sys.executable, "-c", WATCH, folder]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        seen = until(ours, b"", lambda seen: seen.count(b"step 1") >= 3)
        run[0].failed("rank 1 [was] killed")
        run[0].ended(137)
        run[0].close()
        told = b"has ended after step 1 with exit code 137: rank 1 [was] killed"
        seen = until(ours, seen, lambda seen: told in seen and seen.endswith(b"\x1b[?25h"))
        assert process.wait() == 0
    os.close(ours)
    os.close(theirs)
    assert b"computes" in seen
    assert b"Traceback" not in seen


def until(file: int, seen: bytes, holds: Callable[[bytes], bool]) -> bytes:
    """Read from a terminal until something holds of all that was read."""
    while not holds(seen):
        assert select.select([file], [], [], 30)[0], seen
        seen += os.read(file, 4096)
    return seen


@pytest.mark.parametrize("width", [40, 100])
def test_under_tmux(run: tuple[PublishedRun, StatusBoard], folder: Path, width: int) -> None:
    """Two runs, of which one ends: its end stays above the table of the other."""
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("there is no tmux")
    other = PublishedRun(plan())
    other.begin(0, range(2))
    other.started([os.getpid()] * 2)
    script = folder / "watch.py"
    script.write_text(WATCH)
    server = [tmux, "-L", f"duoka-{os.getpid()}-{width}", "-f", "/dev/null"]
    words = shlex.join([sys.executable, str(script), str(folder)])
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    session = ["new-session", "-d", "-x", str(width), "-y", "40", f"{words}; sleep 60"]
    subprocess.run([*server, *session], env=env, check=True)
    try:

        def screen(holds: Callable[[str], bool]) -> str:
            for _ in range(300):
                shown = subprocess.run([*server, "capture-pane", "-p"], capture_output=True, text=True).stdout
                if holds(shown):
                    return shown
                time.sleep(0.1)
            raise AssertionError(shown)

        shown = screen(lambda shown: shown.count("computes") == 2 and "0%" in shown)
        assert max(map(len, shown.splitlines())) <= width
        other.ended(0)
        other.close()
        shown = screen(lambda shown: shown.count("computes") == 1)
        assert " ".join(shown.split()).startswith(f"train.py (pid {os.getpid()}) has ended after step 0 train.py")
        run[0].close()
        shown = screen(lambda shown: " ".join(shown.split()).count("has ended after step") == 2)
        assert shown.count("computes") == 1  # the last table stays
    finally:
        subprocess.run([*server, "kill-server"], check=False)
