"""A worker's life as a whole is in tests/flows."""

from __future__ import annotations

import signal

import pytest

from duoka.launchers.worker import STACKS_SIGNAL, local_rank_args
from duoka.script import Target
from tests.flows.flow import Flow
from tests.flows.group import group, run
from tests.launchers.made import plan


@pytest.mark.parametrize(
    ("flag", "args", "given"),
    [
        (None, (), []),
        ("--local_rank", ("--epochs", "5"), ["--local_rank=1"]),
        ("--local-rank", ("--local-rankings",), ["--local-rank=1"]),
        ("--local_rank", ("--local_rank=0",), []),
        ("--local_rank", ("--local_rank", "0"), []),
    ],
)
def test_local_rank_is_given_where_it_is_parsed_and_not_given_by_hand(
    flag: str | None, args: tuple[str, ...], given: list[str]
) -> None:
    assert local_rank_args(plan(local_rank_flag=flag, target=Target("a.py", args)), rank=1) == tuple(given)


def test_the_signal_for_stacks_is_one_that_nobody_else_uses() -> None:
    assert signal.SIGRTMIN < STACKS_SIGNAL < signal.SIGRTMAX


def test_rank_0_can_be_debugged_at_a_terminal(flow: Flow) -> None:
    """Each worker leads a session, so the terminal does not stop it as a background job."""
    script = group(flow, "if rank == 0:\n    breakpoint()\n    say('went on', sys.stdin.isatty())\nbarrier()")
    at_a_terminal = """if True:
        import os, pty
        pid, terminal = pty.fork()
        if pid:  # as pty.spawn, which starts a new program
            pty._copy(terminal)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    words = ["run", "-q", "--devices", "cpu:2", script]
    result = flow.run(words, prepare=at_a_terminal, stdin="p 6 * 7\nc\n")
    assert result.returncode == 0
    assert "42" in result.stdout.splitlines()
    assert "went on True" in result.stdout


def test_a_worker_s_flags_of_faulthandler_are_the_user_s(flow: Flow) -> None:
    script = group(flow, "import faulthandler; faulthandler.enable(); os.kill(os.getpid(), signal.SIGSEGV)")
    stderr = run(flow, script).stderr
    assert "Fatal Python error: Segmentation fault" in stderr


def test_what_an_exit_function_raises_is_shown_and_the_code_stays(flow: Flow) -> None:
    script = group(flow, "import atexit; atexit.register(lambda: 1 / 0); sys.exit(4)")
    result = run(flow, script)
    assert result.returncode == 4
    assert result.stderr.count("ZeroDivisionError") == 2


def test_what_torch_takes_down_at_exit_is_left_and_the_script_s_own_is_not(flow: Flow) -> None:
    """Ranks notice each other's end when it is over; torch's part of it takes longer than all the rest."""
    script = group(
        flow,
        """
        import weakref
        class Mine: ...
        mine = Mine()
        weakref.finalize(mine, say, "finalized")
        library = torch.library.Library("duoka_tests", "DEF")
        torch.library._del_library = lambda *_: say("taken down")
        weakref.finalize(library, torch.library._del_library)
        """,
    )
    assert run(flow, script).ok().stdout == "finalized\n" * 2


def test_closed_streams_are_no_error(flow: Flow) -> None:
    script = group(flow, "sys.stdout.close(); sys.stderr.close()")
    assert run(flow, script).returncode == 0


def test_an_object_with_write_and_flush_in_place_of_a_stream_is_no_error(flow: Flow) -> None:
    script = flow.write(
        "tee.py",
        """
        import sys
        class Tee:
            def __init__(self): self.file, self.stream = open("copy.txt", "w"), sys.stdout
            def write(self, text): self.file.write(text); self.stream.write(text)
            def flush(self): self.file.flush(); self.stream.flush()
        sys.stdout = Tee()
        print("hello")
        """,
    )
    assert str(run(flow, script)) == str(flow.python([script]))


@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_a_process_that_the_script_forks_may_come_to_its_end(flow: Flow, kind: str) -> None:
    """Under python it ends there by itself, and so does an error in it."""
    script = flow.write(
        "script.py",
        """
        import os, sys, time
        import torch
        children = []
        for end in ("last line", "exit", "error"):
            child = os.fork()
            if child == 0:
                if end == "exit": sys.exit(3)
                if end == "error": raise ValueError("in a child")
                break
            children.append(child)
        else:
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            print(codes, torch.nn.Linear(2, 1)(torch.ones(4, 2)).shape)
        """,
    )
    expected = flow.python([script]).ok()
    result = run(flow, script, options=("--kind", kind, "--log-dir", "logs")).ok()
    assert (result.stdout, result.stderr) == (expected.stdout, expected.stderr)
    assert "[0, 3, 1]" in result.stdout
