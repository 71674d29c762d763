"""Ranks that wait for one that does not come. Plain scripts: those tell the board where they are."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.flows.flow import Flow, Result

# Of processes: on cards for what their runtime does with a process that hangs.
pytestmark = pytest.mark.cpu_and_cards(long=True)

PLAIN = """\
import ctypes, os, signal, sys, time
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
is_rank_0 = os.readlink("/proc/self/fd/0") != os.devnull  # a plain script is told in no other way

def epoch():
    for x, y in torch.utils.data.DataLoader(data, batch_size=8):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

epoch()
"""


def run(flow: Flow, then: str, workers: int = 2, timeout: int = 3) -> Result:
    script = flow.write("script.py", PLAIN + textwrap.dedent(then))
    words: list[str | Path] = [
        "run",
        "-q",
        "--devices",
        f"cpu:{workers}",
        "--timeout",
        str(timeout),
        "--log-dir",
        "logs",
        script,
    ]
    return flow.run(words, stdin="something")


def test_a_rank_that_does_not_come_is_named_with_its_stack(flow: Flow) -> None:
    body = """
        def forget():
            time.sleep(60)

        if not is_rank_0:
            forget()
        epoch()
        """
    result = run(flow, body)
    assert result.returncode == 1
    headline, *where = result.stderr.splitlines()
    assert re.search(
        r"duoka: rank 1 of 2 \(.*\) in step 5 has not joined \w+ [\d,]+ at script.py:12; it is in script.py:20, "
        r"asleep; rank 0 has waited for \d s \(the limit is 3 s\); the run was ended; logs: logs",
        headline,
    )
    assert re.search(r"  rank 1 is after \w+ [\d,]+ at script.py:14 and is at \(innermost first\):", where[0])
    assert [re.sub(".*/", "", line) for line in where[1:]] == [
        'script.py", line 20 in forget',
        'script.py", line 23 in <module>',
    ]
    assert "in forget" in (flow.folder / "logs/rank1.stacks").read_text()


def test_a_stopped_rank_is_told_to_be_stopped(flow: Flow) -> None:
    result = run(flow, "if not is_rank_0: os.kill(os.getpid(), signal.SIGSTOP)\nepoch()")
    assert result.returncode == 1
    assert re.search(
        r"duoka: rank 1 of 2 \(.*\) in step 5 is stopped \(SIGSTOP\) and has not joined \w+ [\d,]+ at script.py:12; "
        r"rank 0 has waited for \d s",
        result.stderr,
    )


def test_a_rank_that_holds_the_interpreter_s_lock_is_found_too(flow: Flow) -> None:
    # Asking for its stack wakes it, so it sleeps again.
    result = run(flow, "while not is_rank_0: ctypes.PyDLL(None).sleep(60)\nepoch()")
    assert result.returncode == 1
    assert re.search(r"it is in script\.py:18|script\.py\", line 18 in <module>", result.stderr)


def test_a_rank_that_leaves_is_told_from_one_that_waits(flow: Flow) -> None:
    result = run(flow, "if not is_rank_0: sys.exit()\nepoch()", workers=3)
    assert result.returncode == 1
    assert re.search(
        r"duoka: ranks 1 and 2 of 3 \(.*\) left in step 5, after \w+ [\d,]+ at script.py:14: the script ended there, "
        r"while rank 0 waited in \w+ [\d,]+ at script.py:12",
        result.stderr,
    )


def test_a_rank_that_leaves_but_whose_process_goes_on_is_found_by_the_board(flow: Flow) -> None:
    body = """
        import threading
        if not is_rank_0:
            threading.Thread(target=time.sleep, args=(60,)).start()
            sys.exit()
        epoch()
        """
    result = run(flow, body, timeout=600)
    assert result.returncode == 1
    assert re.search(r"rank 1 of 2 \(.*\) left in step 5, after", result.stderr)


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_rank_that_does_not_exit_is_named(flow: Flow, workers: int) -> None:
    body = """
        import atexit, threading
        if is_rank_0:
            threading.Thread(target=time.sleep, args=(60,)).start()
        """
    result = run(flow, body, workers=workers)
    assert result.returncode == 1
    who, since = rf"rank 0 of {workers} \(.*\)", r"\d+ s after the script ended \(the limit is 3 s\)"
    assert re.search(rf"duoka: {who} has not exited {since}; the run was ended; logs: logs", result.stderr)
    assert "threading.py" in result.stderr
    assert "Thread" in (flow.folder / "logs/rank0.stacks").read_text()


@pytest.mark.long  # a limit so long that a rank on a busy machine is not idle for half of it
def test_a_rank_that_works_at_exit_is_waited_for(flow: Flow) -> None:
    body = """
        import atexit
        def work():
            until = time.clock_gettime(time.CLOCK_MONOTONIC) + 25
            while time.clock_gettime(time.CLOCK_MONOTONIC) < until:
                pass
            print("saved")
        atexit.register(work)
        """
    assert run(flow, body, timeout=20).ok().stdout == "saved\n"


def test_where_a_rank_died_is_told(flow: Flow) -> None:
    result = run(flow, "if not is_rank_0: os.kill(os.getpid(), signal.SIGKILL)\nepoch()")
    assert result.returncode == 137
    assert re.search(r"rank 1 of 2 ended by SIGKILL.*, after \w+ [\d,]+ at script.py:14", result.stderr)


def test_ranks_that_do_different_things_are_told_apart(flow: Flow) -> None:
    result = run(flow, "if is_rank_0: print(model(torch.ones(3, 4)).sum())\nelse: epoch()")
    assert result.returncode == 1
    assert "ranks called different collectives" in result.stderr or "has not joined" in result.stderr
