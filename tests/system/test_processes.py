from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from duoka.system.processes import describe, odd_state, process_state, session_members, work_done


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
        assert process_state(sleeper.pid) != "T"
        sleeper.send_signal(signal.SIGSTOP)
        until(lambda: process_state(sleeper.pid) == "T")
        assert odd_state(sleeper.pid) == "is stopped (SIGSTOP)"
        sleeper.kill()


def test_no_process_no_state() -> None:
    assert odd_state(2**22 + 1) == ""
    assert process_state(2**22 + 1) != "T"


def test_work_is_told_from_sleep_in_a_child_too() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    for job, works in (("while True: pass", True), ("import time; time.sleep(60)", False)):
        with subprocess.Popen([sys.executable, "-c", script, job], start_new_session=True) as leader:
            until(lambda: len(session_members([leader.pid])) == 2)
            if works:
                before = work_done(leader.pid)
                until(lambda: work_done(leader.pid) > before)  # noqa: B023
            else:
                until(lambda: len({(work_done(leader.pid), time.sleep(0.3)) for _ in range(4)}) == 1)
                assert process_state(leader.pid) == "S"
            os.killpg(leader.pid, signal.SIGKILL)


def test_user_command_and_start_of_a_process() -> None:
    user, command, since = describe(os.getpid())
    assert since is not None
    assert 0 < time.time() - since < 24 * 3600
    assert since == pytest.approx(psutil.Process().create_time(), abs=2)
    assert user == pwd.getpwuid(os.getuid()).pw_name
    assert os.path.basename(sys.executable)[:6] in command


def test_a_process_that_is_not_there() -> None:
    assert describe(4194304 + 1) == ("", "", None)
