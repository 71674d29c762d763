from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable

import pytest

from duoka.cli import main
from tests.devices.driver import play

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_a_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    play(monkeypatch, "eight")
    assert main(["gpus"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
    assert main(["gpus", "--processes"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 14
    assert main(["gpus", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gpus"]) == 8


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


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_watching_draws_until_a_key_and_leaves_the_terminal_as_it_was(key: bytes) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "duoka", "gpus", "--watch"]
    process = subprocess.Popen(
        words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    seen = b""
    while b"q quits" not in seen:
        assert select.select([ours], [], [], 30)[0], seen
        seen += os.read(ours, 4096)
    os.write(ours, key)
    while process.poll() is None:
        if select.select([ours], [], [], 0.05)[0]:
            seen += os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    assert process.returncode == 0, seen
    assert b"\x1b[?1049h" in seen  # a screen of its own, in place
