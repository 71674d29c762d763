"""`duoka run --restarts`: what is killed is started again, and goes on from where it last saved."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.flows.flow import Flow, Result
from tests.flows.group import GROUP, group, start, until

# A plain script whose loader knows its position.
TRAINING = """
import sys, time
import torch
import duoka

class Batches:
    position = 0

    def __iter__(self):
        while self.position < 6:
            self.position += 1
            yield torch.randn(8, 4)
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = Batches()
states = {"model": model, "optimizer": optimizer, "loader": loader}
saved = duoka.Checkpoint(sys.argv[1], states, every_steps=2)
print("begins")
for epoch in saved.epochs(3):
    for x in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, saved.step_number, f"{loss.item():.7f}", flush=True)
        time.sleep(float(sys.argv[2]))
        saved.step()
torch.save(model.state_dict(), f"{sys.argv[1]}.pt")
"""


def again(flow: Flow, script: Path, *words: str | Path, workers: int = 2, restarts: int = 1) -> Result:
    return flow.run(["run", "--quiet", "--devices", f"cpu:{workers}", "--restarts", str(restarts), script, *words])


@pytest.mark.parametrize(
    ("workers", "victim"),
    [(1, 0), (2, 0), (2, 1), (3, 2), pytest.param(2, 1, marks=pytest.mark.cards, id="2-1-cards")],
)
def test_a_run_with_a_rank_killed_ends_with_the_weights_of_an_undisturbed_one(
    workers: int, victim: int, flow: Flow
) -> None:
    import torch

    script = flow.script(flow.write("train.py", TRAINING))
    steps = again(flow, script, "whole", "0", workers=workers).ok().stdout.splitlines()
    running = start(flow, script, "broken", "0.05", workers=workers, options=("--restarts", "1"))
    until(lambda: "\n1 9 " in running.stdout())
    os.kill(children(running.pid)[victim], signal.SIGKILL)
    disturbed = running.wait().ok()
    whole, broken = (torch.load(flow.folder / name, map_location="cpu") for name in ("whole.pt", "broken.pt"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    seen = disturbed.stdout.splitlines()
    _, middle = (number for number, line in enumerate(seen) if line == "begins")
    step = int(seen[middle + 1].split()[1])
    assert step in (6, 8, 10, 12)  # that of step 8 may still be written
    assert set(seen[1:middle]) | set(seen[middle + 1 :]) == set(steps[1:])  # the same numbers, some of them twice
    told = f"duoka: restart 1 of 1, from the checkpoint of step {step}, after: rank {victim} was killed by SIGKILL\n"
    assert told in disturbed.stderr
    assert f"rank {victim} of {workers} ended by SIGKILL" in disturbed.stderr


def children(pid: int) -> list[int]:
    """In the order in which they were forked."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


FAULTY = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 0:
    say("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
"""


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "rank 1 was killed by SIGSEGV"),
        ("os._exit(7)", "rank 1 exited with code 7"),
        ("raise ValueError('boom')", "rank 1 raised ValueError: boom"),
        ("sys.exit(0)", "rank 1 left while others went on"),
    ],
)
def test_a_script_with_its_own_ranks_is_started_again_after_a_fault(fault: str, cause: str, flow: Flow) -> None:
    then = f"if attempt == 0 and rank == 1:\n    {fault}\nif attempt == 0: time.sleep(1.2)\nbarrier()\n"
    result = again(flow, group(flow, FAULTY + then)).ok()
    assert result.stdout == "attempt 0 of 1\nattempt 1 of 1\n"
    assert f"duoka: restart 1 of 1 after: {cause}\n" in result.stderr


def test_a_hang_is_a_fault(flow: Flow) -> None:
    script = flow.write("train.py", TRAINING)
    words = ["--timeout", "1", "--restarts", "1"]
    running = start(flow, script, "broken", "0.05", options=tuple(words))
    until(lambda: "\n1 9 " in running.stdout())
    os.kill(children(running.pid)[1], signal.SIGSTOP)
    result = running.wait().ok()
    assert re.search(
        r"duoka: restart 1 of 1, from the checkpoint of step \d+, after: rank 1 did not come\n", result.stderr
    )


def test_restarts_are_used_up_and_the_last_exit_code_is_the_run_s(flow: Flow) -> None:
    script = group(flow, FAULTY + "if rank == 1: os._exit(10 + attempt)\nwhile True: barrier()\n")
    result = again(flow, script, restarts=2)
    assert result.returncode == 12
    told = [line for line in result.stderr.splitlines() if "restart" in line]
    assert told[0] == "duoka: restart 1 of 2 after: rank 1 exited with code 10"
    waits = (
        r"duoka: restart 2 of 2 in 1 s, as the one before failed within \d\.\d s, after: rank 1 exited with code 11"
    )
    assert re.fullmatch(waits, told[1])
    assert told[2:] == ["duoka: all 2 restarts are used up"]


@pytest.mark.parametrize(
    ("body", "code"),
    [("sys.exit(3)", 3), ("sys.exit(75)", 75), ("sys.exit(0)", 0), ("import duoka; duoka.devices('no')", 2)],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_no_fault_is_not_tried_again(body: str, code: int, workers: int, flow: Flow) -> None:
    script = flow.write("script.py", f"import sys\nimport torch\nprint('once')\n{body}\n")
    result = again(flow, script, workers=workers)
    assert (result.returncode, result.stdout) == (code, "once\n"), result
    assert "restart" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_asked_to_end_does_not_begin_again(number: signal.Signals, flow: Flow) -> None:
    running = start(flow, group(flow, "say('ready')\nwhile True: barrier()"), options=("--restarts", "3"))
    until(lambda: "ready" in running.stdout())
    running.send(number)
    result = running.wait()
    assert result.returncode == 128 + number
    assert "restart" not in result.stderr


def test_a_signal_while_a_restart_waits(flow: Flow) -> None:
    script = group(flow, "if rank == 0: sys.exit(5)\nbarrier()\n")
    running = start(flow, script, options=("--restarts", "9"))
    until(lambda: "restart 3 of 9 in 2 s" in running.stderr())
    running.send(signal.SIGTERM)
    result = running.wait()
    assert result.returncode == 128 + signal.SIGTERM
    assert result.stderr.endswith("duoka: stopped\n")


def test_logs_of_each_attempt_are_apart(flow: Flow) -> None:
    script = group(flow, FAULTY + "print('log of', attempt)\nsys.stdout.flush()\nif attempt == 0: os._exit(1)\n")
    flow.run(["run", "-q", "--devices", "cpu:2", "--restarts", "1", "--log-dir", "logs", script]).ok()
    logs = {
        str(path.relative_to(flow.folder / "logs")): path.read_text() for path in flow.folder.glob("logs/**/*.log")
    }
    assert {name: "log of 0" in text for name, text in logs.items()} == {
        "rank1.log": True,
        "restart1/rank1.log": False,
    }


def test_one_worker_is_what_it_is_under_python(flow: Flow) -> None:
    body = "import os, sys\nimport torch\nprint(sys.argv[1:], __name__, 'RANK' in os.environ, input())\n"
    script = flow.write("script.py", body)
    words: list[str | Path] = ["run", "-q", "--devices", "cpu:1", "--restarts", "1", script, "word"]
    assert flow.run(words, stdin="typed\n").ok().stdout == flow.python([script, "word"], stdin="typed\n").ok().stdout
    flow.write("script.py", "import torch\n1 / 0\n")
    failed = flow.run(words)
    trace = flow.python([script]).stderr
    assert failed.returncode == 1
    assert failed.stderr.count(trace) == 2
    assert "duoka: restart 1 of 1 after: rank 0 raised ZeroDivisionError: division by zero\n" in failed.stderr


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
def test_thirty_of_thirty_connect_again(workers: int, flow: Flow) -> None:
    body = f"if attempt == 0 and rank == {workers - 1}: os.kill(os.getpid(), signal.SIGKILL)\nbarrier()\n"
    script = flow.write("script.py", GROUP + FAULTY + body)
    for _ in range(30):
        assert again(flow, script, workers=workers).ok().stdout == "attempt 0 of 1\nattempt 1 of 1\n"
