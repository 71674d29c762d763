from __future__ import annotations

import pytest

from tests.flows.flow import Flow, Result
from tests.launchers.made import ending, lost, raised, worker

CREW = """
import os, signal, sys, time
from pathlib import Path

sys.path.insert(0, {root!r})
from duoka.supervision.status_board import StatusBoard
from duoka.launchers.workers import WorkerGroup
from duoka.launchers.processes import Outputs
from duoka.launchers.processes import Signals
from duoka.script import Target
from duoka.planning.plan import Kind
from duoka.launchers.worker import Attempt
from tests.launchers.made import CPU, plan

def group_of(source, size=2):
    Path("script.py").write_text("import os, signal, sys, time\\n" + source)
    group = WorkerGroup(signals)
    what = plan(target=Target("script.py"), kind=Kind.DISTRIBUTED, devices=(CPU,) * size)
    group.start(Attempt(what, 0, "id", 0, StatusBoard.create(size)), Outputs(None, range(0)))
    return group

def number_of_files():
    return len(os.listdir("/proc/self/fd"))

signals = Signals()
signals.__enter__()
"""


def run(flow: Flow, source: str) -> Result:
    from tests.flows.flow import ROOT

    return flow.python([flow.write("first.py", CREW.format(root=str(ROOT)) + source)]).ok()


def test_workers_wait_for_the_word_and_tell_how_they_ended(flow: Flow) -> None:
    source = """
group = group_of("sys.exit(int(os.environ['RANK']) + int(os.environ['MASTER_PORT']))")
assert not group.wait(group.done, 0.3)
group.go(7)
assert group.wait(group.gone, 30)
print([(one.ending.how, one.ending.code, one.status, one.failed) for one in group.workers])
group.close()
"""
    assert run(flow, source).stdout == "[('exited', 7, 7, True), ('exited', 8, 8, True)]\n"


def test_a_long_last_word_is_heard_whole(flow: Flow) -> None:
    source = """
group = group_of("raise ValueError('x' * 3_000_000)")
group.go(7)
assert group.wait(group.gone, 30)
print([len(one.ending.error) for one in group.workers])
group.close()
"""
    assert run(flow, source).stdout == "[3000012, 3000012]\n"


def test_no_process_and_no_descriptor_is_left(flow: Flow) -> None:
    source = """
before = number_of_files()
for _ in range(3):
    group = group_of("pass")
    group.go(7)
    assert group.wait(group.gone, 30)
    group.close()
print(number_of_files() - before)
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child")
"""
    assert run(flow, source).stdout == "0\nno child\n"


def test_a_worker_is_ended_with_all_it_started(flow: Flow) -> None:
    source = """
group = group_of('''
stubborn = int(os.environ["RANK"])
if os.fork() == 0:
    os.setpgrp()
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"ready{os.getpid()}", "w").close()
time.sleep(60)
''')
group.go(7)
while len(list(Path().glob("ready*"))) < 4:
    time.sleep(0.01)
group.end()
print([one.status for one in group.workers], group.failed())
group.close()
"""
    assert run(flow, source).stdout == "[-15, -9] False\n"  # the fixture finds what is left behind


def test_whose_script_has_ended_may_leave_by_itself(flow: Flow) -> None:
    source = """
group = group_of("import atexit; atexit.register(time.sleep, 1); sys.exit(3)")
group.go(7)
assert group.wait(group.done, 30) and not group.gone()
group.end()
print([one.status for one in group.workers])
group.close()
"""
    assert run(flow, source).stdout == "[3, 3]\n"


def test_a_group_that_is_closed_early_is_ended(flow: Flow) -> None:
    run(flow, "group = group_of('time.sleep(60)')\ngroup.go(7)\ngroup.close()\n")  # the fixture finds what is left


def test_too_many_processes_are_said_to_be_too_many(flow: Flow) -> None:
    source = """
import duoka.launchers.workers as module
from duoka.errors import WorkerFailed
real, calls = module.fork, []
def fork(*args):
    calls.append(1)
    if len(calls) == 3:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return real(*args)
module.fork = fork
try:
    group_of("time.sleep(60)", size=4)
except WorkerFailed as error:
    print(error)
"""
    assert "only 2 of 4 workers could be started: Resource temporarily unavailable" in run(flow, source).stdout


@pytest.mark.parametrize(
    ("one", "done", "succeeded", "failed"),
    [
        (worker(0), False, False, False),
        (worker(0, ending()), True, True, False),
        (worker(0, ending(), 0), True, True, False),
        (worker(0, ending(), -11), True, True, True),
        (worker(0, raised(0)), True, False, True),
        (worker(0, lost(0), 1), True, False, True),
        (worker(0, None, 0), True, True, False),
        (worker(0, None, 5), True, False, True),
        (worker(0, None, -9), True, False, True),
        (worker(0, None, -9, signalled_at=9.0), True, False, False),
        (worker(0, raised(0), -9, signalled_at=9.0), True, False, True),
    ],
)
def test_what_is_known_of_a_worker(one: object, done: bool, succeeded: bool, failed: bool) -> None:
    assert (one.done, one.succeeded, one.failed) == (done, succeeded, failed)  # type: ignore[attr-defined]
