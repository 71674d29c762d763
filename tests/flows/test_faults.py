"""The catalogue of faults, each injected into a real run; loops over it are long."""

from __future__ import annotations

import random
import re
import shutil
import statistics
import subprocess
import sys

import pytest

from tests.flows.faults.runs import CATALOGUE, FINE, HANGS, Injection, Outcome, inject
from tests.flows.flow import Flow
from tests.flows.group import group, run

INJECTIONS = 500
QUICK = [
    *(
        ("plain", fault)
        for fault in sorted(set(CATALOGUE["plain"]) - {"abort", "child", "none", "segfault", "slow", "stop"})
    ),
    *(("ranked", fault) for fault in ("break", "order", "raise", "sleep", "stop", "work")),
]


@pytest.mark.parametrize(("script", "fault"), QUICK)
def test_each_fault_is_told(flow: Flow, script: str, fault: str) -> None:
    outcome = inject(flow, Injection(script, fault, rank=2, step=5, workers=3))
    assert outcome.wrong == "", outcome.result
    assert outcome.left == []


@pytest.mark.parametrize("fault", ["raise", "exit-0", "kill"])
def test_the_step_is_told(flow: Flow, fault: str) -> None:
    outcome = inject(flow, Injection("plain", fault, rank=0, step=3, workers=2))
    assert "in step 4" in outcome.result.stderr


def test_memory_that_runs_out_says_what_helps(flow: Flow) -> None:
    outcome = inject(flow, Injection("ranked", "memory", rank=1, step=1, workers=2))
    assert "a smaller batch_size" in outcome.result.stderr


DEBUGGED = """
import pdb
reading, writing = os.pipe()
if rank == 0:
    os.dup2(reading, 0)
    if os.fork() == 0:
        time.sleep(4)
        os.write(writing, b"c\\n")
        os._exit(0)
    pdb.Pdb(stdin=open(0), stdout=open(os.devnull, "w")).set_trace()
meet()
"""
API = """
import os, time
import duoka
run = duoka.start()
rank, meet = run.rank, run.barrier
meet()
"""


@pytest.mark.parametrize("kind", ["distributed", "api"])
def test_a_rank_in_a_debugger_is_waited_for(flow: Flow, kind: str) -> None:
    """Rank 0 reads its commands from a pipe that has none to give for longer than the limit."""
    script = group(flow, DEBUGGED) if kind == "distributed" else flow.write("script.py", API + DEBUGGED)
    run(flow, script, options=("--timeout", "2")).ok()


def test_a_rank_that_does_not_come_to_the_start_is_named(flow: Flow) -> None:
    late = "import os, time\nif os.environ['RANK'] == '1': time.sleep(60)\n"
    scripts = [
        flow.write("api.py", f"{late}import duoka\nduoka.start()"),
        flow.write("distributed.py", f"{late}import torch.distributed as dist\ndist.init_process_group('gloo')"),
    ]
    for script, what in zip(scripts, ("start", "init_process_group"), strict=True):
        result = run(flow, script, workers=3, options=("--timeout", "2"))
        assert result.returncode == 1
        assert re.search(rf"rank 1 of 3 \(.*\) has not come to {what} 1", result.stderr), result
        assert f"it is in {script.name}:2, asleep; ranks 0 and 2 wait since" in result.stderr


def test_a_full_disk_under_the_logs_does_not_hide_the_error(flow: Flow) -> None:
    """/dev/full: what can be opened, and not written."""
    script = group(flow, "if rank == 1:\n    print('x' * 100000)\nwhile True: meet()")
    logs = flow.folder / "logs"
    logs.mkdir()
    (logs / "rank1.log").symlink_to("/dev/full")
    result = run(flow, script, options=("--log-dir", "logs"))
    assert result.returncode == 1
    assert "OSError: [Errno 28] No space left on device" in result.stderr
    assert "a disk is full" in result.stderr


def test_too_few_open_files_are_told_before_anything_starts(flow: Flow) -> None:
    script = flow.write("script.py", "print('never')")
    command = [sys.executable, "-m", "duoka", "run", "-q", "--devices", "cpu:3", str(script)]
    limited = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", *command]
    result = subprocess.run(limited, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert "3 workers need 40 more open files" in result.stderr
    assert "ulimit -n 1024" in result.stderr


def many(flow: Flow, draws: random.Random, count: int, faults: set[str] | None = None) -> list[Outcome]:
    """So many runs, each in a folder of its own that does not stay."""
    outcomes = []
    for _ in range(count):
        outcomes.append(inject(flow, Injection.draw(draws, faults)))
        shutil.rmtree(flow.folder / "run")
    return outcomes


def told(outcomes: list[Outcome]) -> str:
    """The figures, and each run that is not as it should be."""
    seconds = [outcome.seconds for outcome in outcomes]
    hangs = [outcome.seconds for outcome in outcomes if outcome.injection.fault in HANGS]
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    lines = [
        f"right: {len(outcomes) - len(wrong)} of {len(outcomes)}",
        f"within 5 s: {sum(one <= 5 for one in seconds)} of {len(seconds)}",
        f"median: {statistics.median(seconds):.2f} s",
        f"hangs, beyond the limit: at most {max(hangs, default=0):.2f} s",
        f"nothing left: {sum(not outcome.left for outcome in outcomes)} of {len(outcomes)}",
        *(f"{outcome.injection}: {outcome.wrong}\n{outcome.result}" for outcome in wrong),
        *(f"{outcome.injection} left {outcome.left}" for outcome in outcomes if outcome.left),
    ]
    return "\n".join(lines)


@pytest.mark.long
def test_seeded_injections(flow: Flow, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = many(flow, random.Random(0), INJECTIONS)
    figures = told(outcomes)
    with capsys.disabled():
        print(figures)
    assert sum(outcome.wrong == "" for outcome in outcomes) >= 0.99 * INJECTIONS, figures
    assert all(not outcome.left for outcome in outcomes), figures


@pytest.mark.long
def test_no_false_alarm(flow: Flow, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the runs have a step that is slow, but not as slow as the limit."""
    outcomes = many(flow, random.Random(1), INJECTIONS, set(FINE) - {"work"})
    alarms = [outcome for outcome in outcomes if outcome.wrong]
    with capsys.disabled():
        print(f"no false alarm: {len(outcomes) - len(alarms)} of {len(outcomes)}")
    assert alarms == []
