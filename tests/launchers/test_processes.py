from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from duoka.launchers.processes import Signals, blocked, orphan_reaper, signal_name
from duoka.system.processes import odd_state
from tests.flows.flow import Flow, Result
from tests.flows.group import until

FORKS = """
import os, signal, sys, tempfile, time
from duoka.launchers.processes import Signals, fork, redirect

def status(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(flow: Flow, source: str) -> Result:
    return flow.python([flow.write("first.py", FORKS + source)], stdin="typed").ok()


def test_a_child_ends_with_the_code_that_its_life_returns(flow: Flow) -> None:
    source = """
with Signals() as signals:
    pid = fork(lambda: 7, signals)
    print(status(pid))
"""
    assert run(flow, source).stdout == "7\n"


def test_a_child_leads_a_session_and_finds_python_s_handlers(flow: Flow) -> None:
    source = """
def life():
    print(os.getsid(0) == os.getpid() == os.getpgid(0))
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    sys.stdout.flush()
    return 0
with Signals() as signals:
    status(fork(life, signals))
"""
    assert run(flow, source).stdout == "True\nTrue\nTrue -1\nset()\n"


def test_a_child_never_comes_back_into_its_parent_s_code(flow: Flow) -> None:
    source = """
def life(error):
    raise error
with Signals() as signals:
    for error in (ValueError("boom"), SystemExit(3), KeyboardInterrupt()):
        pid = fork(lambda: life(error), signals)
        sys.stdout.write(f"{status(pid)}\\n")
"""
    result = run(flow, source)
    assert result.stdout == "1\n1\n130\n"
    assert "ValueError: boom" in result.stderr


def test_what_was_not_written_yet_is_written_once(flow: Flow) -> None:
    source = """
sys.stdout.reconfigure(line_buffering=False, write_through=False)
sys.stdout.write("once ")
with Signals() as signals:
    for _ in range(3):
        status(fork(lambda: sys.stdout.flush() or 0, signals))
"""
    assert run(flow, source).stdout == "once "


def test_a_child_has_streams_of_its_own(flow: Flow) -> None:
    source = """
output = tempfile.TemporaryFile()
def life(own):
    redirect(output if own else None, stdin=not own)
    print(repr(sys.stdin.read()), flush=True)
    print("error", file=sys.stderr, flush=True)
    os.system("echo from a shell")
    return 0
with Signals() as signals:
    for own in (True, False):
        status(fork(lambda: life(own), signals))
print("then", os.pread(output.fileno(), 1000, 0))
"""
    result = run(flow, source)
    assert result.stdout == "'typed'\nfrom a shell\nthen b\"''\\nerror\\nfrom a shell\\n\"\n"
    assert result.stderr == "error\n"


def test_lines_of_a_log_are_in_it_at_once(flow: Flow) -> None:
    source = """
output = tempfile.TemporaryFile()
def life():
    sys.stdout.reconfigure(line_buffering=False, write_through=False)
    redirect(output, stdin=False)
    print("a line")
    os.kill(os.getpid(), signal.SIGKILL)
with Signals() as signals:
    print(status(fork(life, signals)), os.pread(output.fileno(), 100, 0))
"""
    assert run(flow, source).stdout == "-9 b'a line\\n'\n"


def test_signals_become_readable_and_are_put_back_afterwards() -> None:
    before = [signal.getsignal(one) for one in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Signals() as signals:
        for one in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), one)
        assert select.select([signals.fd], [], [], 5)[0]
        signals.read()
        assert signals.stops == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
        assert signals.interrupts == 2
        signals.read()
        assert len(signals.stops) == 3
    after = [signal.getsignal(one) for one in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            signals.read()
            assert signals.stops == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_for_scripts_are_kept_apart_and_left_to_who_has_a_handler_of_its_own() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        with Signals() as signals:
            for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
                os.kill(os.getpid(), one)
            signals.read()
            assert signals.for_scripts == [signal.SIGUSR1]
            assert signals.stops == [signal.SIGTERM]
            assert seen == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_no_descriptor_is_left_and_restoring_twice_does_no_harm() -> None:
    before = os.listdir("/proc/self/fd")
    with Signals() as signals:
        signals.restore()
    assert os.listdir("/proc/self/fd") == before


def test_blocked_signals_come_afterwards() -> None:
    with Signals() as signals:
        with blocked():
            signal.raise_signal(signal.SIGTERM)
            signals.read()
            assert signals.stops == []
        signals.read()
        assert signals.stops == [signal.SIGTERM]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_names() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(40) == "signal 40"


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
