from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from duoka.cli import main
from duoka.watching import record
from duoka.watching.record import PublishedRun
from tests.hardware.driver import play
from tests.launchers.made import plan

SIZE = ("COLUMNS", "LINES")
Command = Callable[..., subprocess.CompletedProcess[str]]


def test_a_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    play(monkeypatch, "eight")
    assert main(["gpus"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
    assert main(["gpus", "--processes"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 14
    assert main(["gpus", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gpus"]) == 8


def test_ranks_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    play(monkeypatch, "eight")
    monkeypatch.setattr(record, "runtime_folder", lambda: tmp_path)
    run = PublishedRun(plan())
    run.begin(0, range(2))
    run.started([os.getpid(), 4194301])
    assert main(["gpus", "--json"]) == 0
    run.close()
    found = json.loads(capsys.readouterr().out)["gpus"]
    ranks = {process["run"] for gpu in found for process in gpu["processes"] or ()}
    assert ranks == {"", f"rank 1 of run {os.getpid()}"}


def test_on_this_machine(command: Command) -> None:
    done = command("gpus")
    assert done.returncode == 0
    assert "CPU  " in done.stdout or "GPU  name" in done.stdout


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--watch --json", "--watch and --json exclude each other"),
        ("--watch", "--watch needs a terminal"),
        ("x", "got unexpected extra argument"),
    ],
)
def test_what_cannot_be(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", *typed.split()]) == 2
    assert said in capsys.readouterr().err


class Watching:
    """`duoka gpus --watch` in a pseudo-terminal. seen: its output."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(24, 100)
        self.before = termios.tcgetattr(self.theirs)
        self.seen = b""
        words = [sys.executable, "-m", "duoka", "gpus", "--watch"]
        self.process = subprocess.Popen(
            words,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env={**{name: value for name, value in os.environ.items() if name not in SIZE}, "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def frames(self) -> list[list[str]]:
        """Split the output into frames, each drawn from the top of the screen."""
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-GI-Z]", "", self.seen.decode())
        return [frame.splitlines() for frame in text.split("\x1b[H")[1:] if frame]

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert select.select([self.ours], [], [], 30)[0], self.seen
            self.seen += os.read(self.ours, 4096)

    def end(self) -> int:
        """Wait for the end; returns the exit code and checks that the terminal is restored."""
        while self.process.poll() is None:
            if select.select([self.ours], [], [], 0.05)[0]:
                self.seen += os.read(self.ours, 4096)
        while select.select([self.ours], [], [], 0)[0]:
            self.seen += os.read(self.ours, 4096)
        after = termios.tcgetattr(self.theirs)
        os.close(self.theirs)
        os.close(self.ours)
        assert after == self.before
        last = {code: self.seen.rfind(code) for code in (b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25l", b"\x1b[?25h")}
        assert 0 <= last[b"\x1b[?1049h"] < last[b"\x1b[?1049l"]  # back from a screen of its own
        assert 0 <= last[b"\x1b[?25l"] < last[b"\x1b[?25h"]  # the cursor is shown again
        assert b"Traceback" not in self.seen
        return self.process.returncode


@pytest.mark.parametrize("keys", [b"x q", b"\x1a\x1bQ", b"\x03"])
def test_watching_draws_until_a_key_and_leaves_the_terminal_as_it_was(keys: bytes) -> None:
    watching = Watching()
    watching.until(lambda: b"q quits" in watching.seen)
    os.write(watching.ours, keys)
    assert watching.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    watching = Watching()
    watching.until(lambda: b"q quits" in watching.seen)
    watching.process.send_signal(number)
    assert watching.end() == 128 + number


def test_watching_draws_in_place_and_follows_the_size_of_the_terminal() -> None:
    watching = Watching()
    watching.until(lambda: len(watching.frames()) >= 3)
    assert {len(frame) for frame in watching.frames()[:2]} == {24}
    watching.resize(10, 30)
    watching.until(lambda: len(watching.frames()[-2]) == 10)
    assert max(map(len, watching.frames()[-2])) <= 30
    os.write(watching.ours, b"q")
    assert watching.end() == 0
