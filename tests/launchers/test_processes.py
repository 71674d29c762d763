from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from duoka.launchers.processes import is_stopped, odd_state, session_members


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_members_of_a_session_are_found_whatever_their_group() -> None:
    starts_another = "import os, time; os.fork() or os.setpgrp(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", starts_another], start_new_session=True) as leader:
        until(lambda: {os.getpgid(pid) == leader.pid for pid in session_members([leader.pid])} == {True, False})
        members = session_members([leader.pid])
        assert len(members) == 2
        for pid in members:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not session_members([leader.pid]))


def test_who_has_ended_is_no_member() -> None:
    with subprocess.Popen(["true"], start_new_session=True) as ended:
        until(lambda: odd_state(ended.pid) == "has ended")
        assert session_members([ended.pid]) == []


def test_a_stopped_process_is_told_from_a_running_one() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        until(lambda: odd_state(sleeper.pid) == "")  # it may wait for the disk while it is loaded
        assert not is_stopped(sleeper.pid)
        sleeper.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(sleeper.pid))
        assert odd_state(sleeper.pid) == "is stopped (SIGSTOP)"
        sleeper.kill()


def test_no_process_no_state() -> None:
    assert odd_state(2**22 + 1) == ""
    assert not is_stopped(2**22 + 1)
