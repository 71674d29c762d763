"""Signals to the command process while it has workers."""

from __future__ import annotations

import signal
import textwrap
import time

import psutil
import pytest

from tests.flows.flow import Flow, Running
from tests.flows.group import group, start, until

SAVES = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
open(f"ready{rank}", "w").close()
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    say("saved")
    raise
"""


def ready(flow: Flow, running: Running, workers: int = 2) -> Running:
    until(lambda: all((flow.folder / f"ready{rank}").exists() for rank in range(workers)))
    return running


def test_ctrl_c_lets_the_script_save(flow: Flow) -> None:
    running = ready(flow, start(flow, group(flow, SAVES)))
    running.send(signal.SIGINT)
    result = running.wait()
    assert (result.returncode, result.stdout, result.stderr) == (130, "saved\n" * 2, "duoka: interrupted\n")


def test_ctrl_c_twice_ends_it_at_once(flow: Flow) -> None:
    running = ready(flow, start(flow, group(flow, SAVES.replace("sleep(1)", "sleep(60)"))))
    before = time.monotonic()
    running.send(signal.SIGINT)
    time.sleep(0.5)
    running.send(signal.SIGINT)
    result = running.wait()
    assert time.monotonic() - before < 8, "it waited for the scripts"
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "duoka: interrupted; ranks 0 and 1 had to be ended by force\n"


def test_ctrl_c_that_the_kernel_gave_to_another_thread_wakes_the_main_one(flow: Flow) -> None:
    body = """
        import threading
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    """
    running = ready(flow, start(flow, group(flow, textwrap.dedent(body) + SAVES)))
    running.send(signal.SIGINT)
    result = running.wait()
    assert (result.returncode, result.stdout, result.stderr) == (130, "saved\n" * 2, "duoka: interrupted\n")


def test_ctrl_c_while_a_rank_waits_in_torch_for_one_that_ends(flow: Flow) -> None:
    source = """
        import os, time
        import torch.distributed as dist
        if os.environ["RANK"] == "0":
            time.sleep(60)
        open("ready1", "w").close()
        dist.init_process_group("gloo")
    """
    running = start(flow, flow.write("script.py", source))
    until((flow.folder / "ready1").exists)
    time.sleep(0.5)  # it comes to init_process_group
    before = time.monotonic()
    running.send(signal.SIGINT)
    result = running.wait()
    assert time.monotonic() - before < 8, "it waited for rank 1 to answer"
    assert (result.returncode, result.stderr) == (130, "duoka: interrupted; rank 1 had to be ended by force\n")


def test_ctrl_c_that_a_script_answers_with_a_code_of_its_own(flow: Flow) -> None:
    running = ready(flow, start(flow, group(flow, SAVES.replace("raise\n", "sys.exit(9)\n"))))
    running.send(signal.SIGINT)
    assert running.wait().returncode == 9


def test_ctrl_c_hurries_the_end_after_an_error_but_does_not_hide_it(flow: Flow) -> None:
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"ready{rank}", "w").close()
        if rank == 1: raise ValueError("boom")
        time.sleep(60)
        """
    running = ready(flow, start(flow, group(flow, body)))
    time.sleep(1)
    running.send(signal.SIGINT)
    result = running.wait()
    assert result.returncode == 1
    assert "ValueError: boom" in result.stderr
    assert "interrupted" not in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_request_to_end_is_passed_on(flow: Flow, number: signal.Signals, code: int) -> None:
    running = ready(flow, start(flow, group(flow, "open(f'ready{rank}', 'w').close()\ntime.sleep(60)")))
    running.send(number)
    result = running.wait()
    assert (result.returncode, result.stderr) == (code, "duoka: stopped\n")


def test_a_request_to_end_can_be_answered(flow: Flow) -> None:
    body = SAVES.replace('sys.exit("ended")', "(time.sleep(1), say('saved'), sys.exit(0))")
    running = ready(flow, start(flow, group(flow, body)))
    running.send(signal.SIGTERM)
    time.sleep(0.2)
    running.send(signal.SIGTERM)  # schedulers ask twice: that must not cost what is being saved
    result = running.wait()
    assert (result.returncode, result.stdout) == (0, "saved\n" * 2)


def test_workers_do_not_outlive_the_command(flow: Flow) -> None:
    running = ready(flow, start(flow, group(flow, SAVES)))
    children = psutil.Process(running.pid).children()
    assert len(children) == 3  # the workers and the reaper
    running.send(signal.SIGKILL)
    assert running.wait().returncode == 137
    until(lambda: not any(child.is_running() for child in children), seconds=20)


def test_what_the_workers_started_does_not_outlive_the_command_either(flow: Flow) -> None:
    body = """
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(79)"])
        open(f"ready{rank}", "w").close()
        time.sleep(60)
        """
    running = ready(flow, start(flow, group(flow, body)))
    running.send(signal.SIGKILL)
    assert running.wait().returncode == 137  # and nothing is left behind


def test_what_ignores_ctrl_c_goes_on_to_ignore_it(flow: Flow) -> None:
    """A job put in the background by a shell that has no job control is started so."""
    script = group(flow, "say(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)")
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    result = flow.run(["run", "-q", "--devices", "cpu:2", script], prepare=ignoring).ok()
    said = result.stdout.splitlines()  # with what gloo of torch 2.10 writes
    assert said.count("True") == 2
    assert "False" not in said


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_what_is_meant_for_scripts_is_passed_on(flow: Flow, number: signal.Signals) -> None:
    body = f"""
        asked = []
        signal.signal({int(number)}, lambda *_: asked.append(1))
        open(f"ready{{rank}}", "w").close()
        while len(asked) < 2: time.sleep(0.01)
        barrier()
        """
    running = ready(flow, start(flow, group(flow, body)))
    running.send(number)
    time.sleep(0.3)
    running.send(number)
    assert running.wait().ok().stderr == ""


def test_what_scripts_do_not_take_in_ends_them_as_under_python(flow: Flow) -> None:
    script = group(flow, "open(f'ready{rank}', 'w').close()\ntime.sleep(60)")
    running = ready(flow, start(flow, script, options=("--restarts", "3")))
    running.send(signal.SIGUSR1)
    result = running.wait()
    assert result.returncode == 128 + signal.SIGUSR1
    assert "ended by SIGUSR1" in result.stderr
    assert "restart" not in result.stderr  # somebody wanted that
