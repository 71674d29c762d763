"""The warm process must give what a shell and a new interpreter would give."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.flows.flow import Flow, without_noise

ENDS = {
    "end": "print('out'); import sys; print('err', file=sys.stderr)",
    "exit code": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('sorry')",
    "exception": "def f():\n    raise ValueError('no')\nf()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "interrupt": "raise KeyboardInterrupt",
    "syntax": "x = = 1",
    "atexit": "import atexit; atexit.register(print, 'bye'); print('hello')",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print(1))).start()",
    "surroundings": "import sys, os; print(sys.argv, os.getcwd(), __file__, sys.path[0], sys.stdin.read())",
    "torch": "import torch; torch.manual_seed(0); print(torch.randn(3, 3) @ torch.randn(3, 3))",
}


@pytest.mark.parametrize("source", ENDS.values(), ids=ENDS)
def test_python_is_what_the_interpreter_is(flow: Flow, source: str) -> None:
    script = flow.write("script.py", source)
    warm = flow.python([script, "a", "--b"], stdin="typed")
    cold = subprocess.run(
        [sys.executable, script, "a", "--b"], cwd=flow.folder, input="typed", capture_output=True, text=True
    )
    code = cold.returncode if cold.returncode >= 0 else 128 - cold.returncode
    assert (warm.returncode, warm.stdout, warm.stderr) == (code, cold.stdout, without_noise(cold.stderr))


def test_output_of_grandchildren_is_captured(flow: Flow) -> None:
    script = flow.write("script.py", "import subprocess; subprocess.run(['sh', '-c', 'echo out; echo err >&2'])")
    result = flow.python([script])
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


def test_what_is_left_behind_is_told_and_ended(flow: Flow) -> None:
    source = """
        import os, subprocess
        print(subprocess.Popen(["setsid", "sleep", "77"]).pid)
        """
    running = flow.start([flow.write("script.py", source)], program="python", grace=0.2)
    with pytest.raises(AssertionError, match=r"left behind: \['\d+: sleep 77'\]"):
        running.wait()


def test_a_run_that_takes_too_long_is_killed_with_all_it_started(flow: Flow) -> None:
    source = """
        import subprocess, time
        print(subprocess.Popen(["setsid", "sleep", "77"]).pid, flush=True)
        time.sleep(77)
        """
    running = flow.start([flow.write("script.py", source)], program="python", timeout=1)
    with pytest.raises(AssertionError, match="not over in time") as error:
        running.wait()
    sleeper = str(error.value).split("--- stdout\n")[1].split()[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int(sleeper), 0)


def test_a_signal_can_be_sent_and_output_read_while_it_runs(flow: Flow) -> None:
    source = """
        import signal, sys, time
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
        print("ready", flush=True)
        time.sleep(50)
        """
    running = flow.start([flow.write("script.py", source)], program="python")
    while "ready" not in running.stdout():
        time.sleep(0.01)
    running.send(signal.SIGUSR1)
    assert running.wait().returncode == 7


def test_two_runs_at_the_same_time(flow: Flow) -> None:
    script = flow.write("script.py", "import sys, time; time.sleep(0.2); print(sys.argv[1])")
    first, second = (flow.start([script, word], program="python") for word in ("one", "two"))
    assert (second.wait().stdout, first.wait().stdout) == ("two\n", "one\n")


def test_a_run_does_not_see_ranks_or_thread_settings_from_outside(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    script = flow.write(
        "script.py", "import os; print([os.environ.get(n) for n in ('RANK', 'OMP_NUM_THREADS', 'X')])"
    )
    assert flow.python([script], env={"X": "1"}).stdout == "[None, None, '1']\n"


def test_runs_do_not_share_random_numbers(flow: Flow) -> None:
    source = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    script = flow.write("script.py", source)
    first, second = (flow.python([script]).stdout.split() for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))
