"""The catalogue of faults, each injected into a real run; loops over it are long."""

from __future__ import annotations

import os
import random
import re
import shutil
import statistics
from collections.abc import Iterator

import pytest

from duoka.system.processes import is_alive
from tests.flows.faults.runs import CATALOGUE, FINE, HANGS, Injection, Outcome, inject
from tests.flows.flow import Flow
from tests.flows.group import group, run, until

INJECTIONS = 500
EACH = [(script, fault) for script in sorted(CATALOGUE) for fault in sorted(CATALOGUE[script])]
LONG = {  # too long, or told as another is
    "plain": {"abort", "child", "command-term", "exit-0", "none", "raise-stay", "segfault", "slow", "stop"},
    "ranked": set(CATALOGUE["ranked"])
    - {"break", "command-term", "exit-0", "order", "raise", "sleep", "stop", "work"},
}
QUICK = [(script, fault) for script, fault in EACH if fault not in LONG[script]]


def check(flow: Flow, injection: Injection) -> Outcome:
    outcome = inject(flow, injection)
    assert outcome.wrong == "", outcome.result
    assert outcome.left == []
    return outcome


@pytest.mark.parametrize(("script", "fault", "workers"), [(*one, 2 + number % 2) for number, one in enumerate(QUICK)])
def test_a_fault_is_told(flow: Flow, script: str, fault: str, workers: int) -> None:
    outcome = check(flow, Injection.of(script, fault, workers - 1, 5, workers))
    if script == "plain" and fault in ("raise", "kill"):
        assert "in step 6" in outcome.result.stderr


@pytest.mark.long
@pytest.mark.parametrize(("script", "fault"), EACH)
@pytest.mark.parametrize("workers", [2, 3])
def test_each_fault_is_told(flow: Flow, script: str, fault: str, workers: int) -> None:
    for rank in (0, workers - 1):
        check(flow, Injection.of(script, fault, rank, 5, workers))
        shutil.rmtree(flow.folder / "run")


def test_the_step_of_an_exit_is_told(flow: Flow) -> None:
    outcome = inject(flow, Injection("plain", "exit-0", 0, 3, workers=2))
    assert "in step 4" in outcome.result.stderr


def test_memory_that_runs_out_says_what_helps(flow: Flow) -> None:
    outcome = inject(flow, Injection("ranked", "memory", 1, 1, workers=2))
    assert "a smaller batch_size" in outcome.result.stderr


def test_memory_that_runs_out_on_one_device(flow: Flow) -> None:
    script = flow.write("train.py", "import torch\nraise torch.OutOfMemoryError('CUDA out of memory.')\n")
    result = flow.run(["run", "--devices", "cpu:1", script])
    assert result.returncode == 1
    *_, error, hint = result.stderr.splitlines()
    assert error == "torch.OutOfMemoryError: CUDA out of memory."
    assert hint.startswith("  memory ran out on this device; what helps: a smaller batch_size")
    assert f"`duoka forecast --memory {script}` says what fits" in hint


LOADING = """
class Zeros(torch.utils.data.Dataset):
    def __len__(self): return 1 << 20
    def __getitem__(self, index): return torch.zeros(1 << 20)

batches = iter(torch.utils.data.DataLoader(Zeros(), batch_size=8, num_workers=4, prefetch_factor=8))
next(batches)
for worker in batches._workers: say(worker.pid)
barrier()
"""
ENDINGS = ["if rank: raise ValueError", "if rank: os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_loader_workers_that_are_ended_leave_no_shared_memory(flow: Flow, ending: str) -> None:
    result = run(flow, group(flow, LOADING + ending))
    assert result.returncode != 0
    pids = result.stdout.split()
    assert len(pids) == 8
    until(lambda: not any(is_alive(int(pid)) for pid in pids))
    assert [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"torch_{pid}_" for pid in pids))] == []


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
barrier()
"""
API = """
import os, time
import duoka
run = duoka.start()
rank, barrier = run.rank, run.barrier
barrier()
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
        assert re.search(rf"rank 1 of 3 \(.*\) has not joined {what} 1", result.stderr), result
        assert f"it is in {script.name}:2, asleep; ranks 0 and 2 have waited for" in result.stderr


def many(flow: Flow, draws: random.Random, count: int, faults: set[str] | None = None) -> list[Outcome]:
    """So many runs, each in a folder of its own that does not stay."""
    outcomes = []
    for _ in range(count):
        outcomes.append(inject(flow, Injection.draw(draws, faults)))
        shutil.rmtree(flow.folder / "run")
    return outcomes


def figures(outcomes: list[Outcome]) -> str:
    """They, and each run that is not as it should be."""
    seconds = [outcome.seconds for outcome in outcomes]
    hangs = [outcome.seconds for outcome in outcomes if outcome.injection.fault in HANGS]
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    lines = [
        f"right: {len(outcomes) - len(wrong)} of {len(outcomes)}",
        f"ended within 5 s: {sum(one <= 5 for one in seconds)} of {len(seconds)}, in {max(seconds):.2f} s at most",
        f"median: {statistics.median(seconds):.2f} s",
        f"hangs told and ended: at most {max(hangs, default=0):.2f} s after the limit",
        f"nothing left: {sum(not outcome.left for outcome in outcomes)} of {len(outcomes)}",
        *(f"{outcome.injection}: {outcome.wrong}\n{outcome.result}" for outcome in wrong),
        *(f"{outcome.injection} left {outcome.left}" for outcome in outcomes if outcome.left),
        *(f"{one.injection} took {one.seconds:.2f} s\n{one.result}" for one in outcomes if one.seconds > 5),
    ]
    return "\n".join(lines)


@pytest.fixture
def seed(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[int]:
    """What the injections are drawn by."""
    number = int(request.config.getoption("--seed"))
    with capsys.disabled():
        print(f"\nseed {number}")
        yield number


@pytest.mark.long
def test_seeded_injections(flow: Flow, seed: int) -> None:
    outcomes = many(flow, random.Random(seed), INJECTIONS)
    told = figures(outcomes)
    print(told)
    assert sum(outcome.wrong == "" for outcome in outcomes) >= 0.99 * INJECTIONS, told
    assert all(not outcome.left for outcome in outcomes), told
    assert all(outcome.seconds <= 5 for outcome in outcomes), told
    assert statistics.median(outcome.seconds for outcome in outcomes) <= 1, told


@pytest.mark.long
def test_no_false_alarm(flow: Flow, seed: int) -> None:
    """Two of three have a step that is slow, asleep or at work, but not as slow as the limit."""
    outcomes = many(flow, random.Random(seed), INJECTIONS, set(FINE))
    alarms = [outcome for outcome in outcomes if outcome.wrong or outcome.left]
    print(f"no false alarm: {len(outcomes) - len(alarms)} of {len(outcomes)}")
    assert alarms == []
