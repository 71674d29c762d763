"""Several workers, and one of them fails: what is told, and what is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.flows.flow import Flow
from tests.flows.group import group, run

# Of processes: on cards for what their runtime does with a process that fails.
pytestmark = pytest.mark.cpu_and_cards(long=True)


def test_an_error_on_one_rank_is_shown_once_and_as_python_shows_it(flow: Flow) -> None:
    script = flow.write(
        "script.py",
        """
        import os, time
        import torch.distributed

        def deep():
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise ValueError("boom") from error

        if os.environ["RANK"] == "1":
            deep()
        time.sleep(60)
        """,
    )
    expected = flow.python([script], env={"RANK": "1"})
    result = run(flow, script, workers=3)
    assert result.returncode == expected.returncode == 1
    assert result.stderr.startswith(expected.stderr)
    headline = f"duoka: raised on rank 1 of 3 ({os.uname().nodename}); the other ranks were ended\n"
    assert result.stderr.removeprefix(expected.stderr) == headline


def test_a_connection_that_broke_with_a_loader_worker_is_told_as_its_death(flow: Flow) -> None:
    source = """
        import os, signal, torch
        from torch.utils.data import DataLoader
        batches = iter(DataLoader(torch.ones(64, 2), 4, num_workers=1, multiprocessing_context="fork"))
        (worker,) = getattr(batches, "_batches", batches)._workers
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # the handler is late
        os.kill(worker.pid, signal.SIGKILL)
        raise ConnectionResetError("by peer")
    """
    script = flow.write("train.py", source)
    result = flow.run(["run", "--devices", "cpu:2", script])
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert "is killed by signal: Killed" in result.stderr
    assert "ConnectionResetError: by peer" not in result.stderr


def test_a_loader_worker_that_dies_while_a_temporary_file_is_made_leaves_none(flow: Flow) -> None:
    source = """
        import os, signal, tempfile, torch
        from torch.utils.data import DataLoader
        folder = tempfile.mkdtemp(dir=os.getcwd())
        batches = iter(DataLoader(torch.ones(64, 2), 4, num_workers=1, multiprocessing_context="fork"))
        (worker,) = getattr(batches, "_batches", batches)._workers
        make = os.open

        def interrupted(*args):
            file = make(*args)
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            return file

        os.open = interrupted
        with tempfile.NamedTemporaryFile(dir=folder):
            os.open = make
        print(f"removed {os.listdir(folder)}\\n", end="", flush=True)  # in one write, as both ranks print
        raise ConnectionResetError("by peer")
    """
    script = flow.write("train.py", source)
    result = flow.run(["run", "--kind", "distributed", "--devices", "cpu:2", script])
    assert (result.returncode, result.stdout) == (1, "removed []\n" * 2)
    assert re.search(
        r"RuntimeError: DataLoader worker .* (is killed by signal: Killed|exited unexpectedly)", result.stderr
    )


def test_the_noise_of_the_others_is_one_line(flow: Flow) -> None:
    result = run(flow, group(flow, "if rank == 1: raise ValueError('boom')\nwhile True: barrier()"), workers=3)
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.endswith("  ranks 0 and 2: lost the connection to rank 1 (--verbose shows it)\n")


def test_verbose_shows_what_the_others_said(flow: Flow) -> None:
    script = group(flow, "if rank == 1: raise ValueError('boom')\nwhile True: barrier()")
    result = flow.run(["run", "--verbose", "--devices", "cpu:2", script])
    assert result.stderr.count("Traceback") == 2
    assert "duoka: rank 0 ended with\nTraceback" in result.stderr
    assert re.search(r"RuntimeError: .*gloo", result.stderr)


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('boom')",
        "def f():\n    f()\nf()",
        "raise KeyboardInterrupt",
        "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
        "error = ValueError('boom'); error.add_note('and more'); raise error",
        "import json; json.loads('{')",
        "class Odd(BaseException): ...\nraise Odd",
        "x = = 1",
    ],
)
def test_an_error_on_all_ranks_is_what_python_shows_and_nothing_else(flow: Flow, body: str) -> None:
    if sys.version_info < (3, 11) and re.search("ExceptionGroup|add_note", body):
        pytest.skip("python 3.11 has it")
    script = flow.write("script.py", f"import torch\n{body}\n")
    expected = flow.python([script])
    result = run(flow, script, options=("--kind", "distributed"))
    assert (result.returncode, result.stdout) == (expected.returncode, expected.stdout)
    assert comparable(result.stderr) == comparable(expected.stderr)


def comparable(trace: str) -> str:
    return re.sub(r"repeated \d+ more", "repeated", trace)


def test_the_script_s_own_hook_shows_its_errors(flow: Flow) -> None:
    script = group(
        flow,
        """
        sys.excepthook = lambda kind, error, trace: print("hook saw", error, file=sys.stderr)
        if rank == 0: raise ValueError("boom")
        while True: barrier()
        """,
    )
    result = run(flow, script)
    assert result.returncode == 1
    assert result.stderr.startswith("hook saw boom\nduoka: raised on rank 0 of 2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_rank_that_dies_is_named_with_the_signal(flow: Flow, number: signal.Signals) -> None:
    script = group(flow, f"if rank == 1: os.kill(os.getpid(), {int(number)})\nwhile True: barrier()")
    result = run(flow, script, workers=3)
    assert result.returncode == 128 + number
    assert f"duoka: rank 1 of 3 ended by {number.name}" in result.stderr
    assert "ranks 0 and 2: lost the connection to rank 1" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_crash_says_where_it_was(flow: Flow) -> None:
    script = group(
        flow,
        """
        import ctypes
        def crash():
            ctypes.string_at(1)
        if rank == 1:
            crash()
        while True: barrier()
        """,
    )
    stderr = run(flow, script).stderr
    assert re.search(r'script.py", line \d+ in crash\n.*script.py", line \d+ in <module>\n', stderr), stderr
    assert "duoka/" not in stderr


def test_a_rank_that_leaves_early_is_named(flow: Flow) -> None:
    result = run(flow, group(flow, "if rank == 1: sys.exit(0)\nwhile True: barrier()"), workers=3)
    assert result.returncode == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(f"duoka: rank 1 of 3 ({os.uname().nodename}) left")
    assert re.search("while ranks 0 and 2 (went on|waited in (all_reduce 3 at script.py:13|collective 3))", first)
    assert second == "  ranks 0 and 2: lost the connection to rank 1 (--verbose shows it)"


def test_ranks_may_end_at_different_times(flow: Flow) -> None:
    assert run(flow, group(flow, "time.sleep(2 * rank); say('end')")).ok().stdout == "end\n" * 2


def test_os_exit_on_one_rank_is_named_and_its_last_words_are_shown(flow: Flow) -> None:
    script = group(flow, "if rank == 1:\n    print('last words', flush=True)\n    os._exit(5)\nwhile True: barrier()")
    result = run(flow, script, options=("--log-dir", "logs"))
    assert result.returncode == 5
    assert "rank 1 of 2 exited with code 5 without ending python" in result.stderr
    assert "    last words\n" in result.stderr


def test_an_error_that_the_network_caused_does_not_hide_the_first(flow: Flow) -> None:
    script = group(
        flow,
        """
        if rank == 0:
            raise ValueError("the first")
        try:
            while True: barrier()
        except RuntimeError as error:
            if rank == 1:
                raise OSError("could not save") from error
            sys.exit("giving up")
        """,
    )
    result = run(flow, script, workers=3)
    assert result.stderr.count("Traceback") == 1
    assert "ValueError: the first" in result.stderr
    assert "ranks 1 and 2: lost the connection to rank 0" in result.stderr


def test_a_failure_keeps_the_logs_of_a_plain_script_and_says_where(flow: Flow) -> None:
    source = """
        import os, torch
        print("a line")
        if os.path.isfile("/proc/self/fd/1") and "(deleted)" in os.readlink("/proc/self/fd/1"):
            os.abort()
        """
    script = flow.write("script.py", source)
    result = run(flow, script)
    found = re.search(r"logs: (.*)", result.stderr)
    assert found, result
    logs = Path(found[1])
    try:
        assert "a line" in (logs / "rank1.log").read_text()
    finally:
        shutil.rmtree(logs)


def test_children_that_a_failed_script_left_are_ended(flow: Flow) -> None:
    script = group(
        flow,
        """
        import subprocess
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(79)"
        for group in (False, True):
            subprocess.Popen([sys.executable, "-c", stubborn], preexec_fn=os.setpgrp if group else None)
        time.sleep(0.5)
        if rank == 1: raise ValueError("boom")
        while True: barrier()
        """,
    )
    result = run(flow, script)  # the fixture finds what is left behind
    assert result.returncode == 1


def test_ranks_that_do_not_listen_are_ended(flow: Flow) -> None:
    script = group(
        flow,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        barrier()
        if rank == 1: raise ValueError("boom")
        while True: time.sleep(1)
        """,
    )
    before = time.monotonic()
    result = run(flow, script)
    assert result.returncode == 1
    assert time.monotonic() - before < 20
    assert "ValueError: boom" in result.stderr


def test_a_rank_that_failed_may_finish_what_it_does_at_exit(flow: Flow) -> None:
    script = group(
        flow,
        """
        import atexit
        atexit.register(lambda: (time.sleep(1.5), say("saved")))
        if rank == 1: raise ValueError("boom")
        while True: barrier()
        """,
    )
    assert run(flow, script).stdout == "saved\n"
