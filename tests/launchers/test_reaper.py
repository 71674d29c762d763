from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from duoka.launchers.processes import odd_state
from duoka.launchers.reaper import orphan_reaper
from tests.flows.group import until


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "79"], start_new_session=True) as sleeper:
        yield sleeper
        sleeper.kill()


def test_what_is_let_go_of_ends_with_the_one_who_watches() -> None:
    reading, writing = os.pipe()
    with orphan_reaper([], None, lambda: os.close(writing)), open(reading, "rb", buffering=0) as end:
        os.close(writing)
        assert select.select([end], [], [], 10)[0]
        assert end.read(1) == b""


def test_who_lives_ends_nobody(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    with orphan_reaper([sleeper.pid], str(folder)):
        folder.mkdir()
        (folder / "socket").touch()
    assert sleeper.poll() is None
    assert not folder.exists()
    with orphan_reaper([sleeper.pid], str(folder)):
        pass  # nobody made it


def test_who_is_killed_is_survived_by_nobody(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with orphan_reaper([sleeper.pid], str(folder)):
            folder.mkdir()
            os.write(writing, b"!")
            signal.pause()
        os._exit(1)
    os.read(reading, 1)
    assert odd_state(sleeper.pid) == ""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until(lambda: sleeper.poll() == -signal.SIGKILL)
    until(lambda: not folder.exists())
    for end in (reading, writing):
        os.close(end)
