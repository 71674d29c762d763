from __future__ import annotations

from tests.flows.flow import Flow, Result

FORKS = """
import os, signal, sys, tempfile, time
from duoka.launchers.forking import fork, redirect
from duoka.launchers.signals import Signals

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
