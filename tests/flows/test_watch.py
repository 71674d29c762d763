"""`duoka watch` attaches to a run, and the run computes the same."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.flows.flow import Flow

TRAINING = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
epoch = 0
while epoch < 3 or not os.path.exists(sys.argv[1]):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    epoch += 1
    if epoch == 3:
        print(f"{model.weight.sum().item():.6f}", flush=True)
"""


def looks(written: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith("\n")]


def test_watching_a_run_of_two_workers(flow: Flow, tmp_path: Path) -> None:
    script, stop = flow.write("train.py", TRAINING), tmp_path / "stop"
    run = flow.start(["run", "--quiet", "--devices", "cpu:2", script, stop])
    while not run.stdout():
        time.sleep(0.05)
    watching = flow.start(["watch", "--json", str(run.pid)])
    while not any(look["steps_per_second"] for look in looks(watching.stdout())):
        time.sleep(0.05)
    stop.touch()
    result = run.wait().ok()
    *before, end = looks(watching.wait().ok().stdout)

    ended = {"event": "end", "pid": run.pid, "steps": before[-1]["steps"], "code": 0, "faults": []}
    assert end == ended
    look = next(look for look in before if look["steps_per_second"])
    assert [one["rank"] for one in look["ranks"]] == [0, 1]
    for one in look["ranks"]:
        assert abs(sum(one["parts"].values()) - 1) < 1e-6
        assert 0 < one["parts"]["waiting"] < 1
        assert 0 < one["parts"]["loading"] < 1
        assert one["memory"] > 1 << 20
    assert abs(look["samples_per_second"] / look["steps_per_second"] / 8 - 1) < 0.5  # of 8 samples each
    assert result.stdout == flow.run(["run", "--quiet", "--devices", "cpu:2", script, stop]).ok().stdout


def test_a_process_that_is_no_run(flow: Flow) -> None:
    result = flow.run(["watch", "1"])
    assert result.returncode == 2
    assert "PID must be that of a running `duoka run` of yours, but is 1" in result.stderr


FAILING = """
import os, signal, time
import torch
import duoka

run = duoka.start(seed=0)
model = run.model(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
until = time.monotonic() + 2.0
for step in range(1_000_000):
    model(run.batch(torch.ones(8, 4))).mean().backward()
    optimizer.step()
    run.log(step, height=step)
    if run.gather_objects(time.monotonic() > until)[0]:
        break
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and run.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_the_report_of_a_run_with_a_fault(flow: Flow, tmp_path: Path, restarts: int) -> None:
    script, report = flow.write("train.py", FAILING), tmp_path / "report.html"
    words = ["--restarts", str(restarts), "--report", report]
    result = flow.run(["run", "--quiet", "--devices", "cpu:2", *words, script])
    text = report.read_text()
    assert f"train.py: ended {'well' if restarts else 'with exit code 137'}" in text, result
    assert "rank 1 was killed by SIGKILL</summary><pre>duoka: rank 1 of 2 ended by SIGKILL" in text
    assert ("restart 1</li>" in text) is bool(restarts)
    assert "<h2>height</h2>" in text
    assert list(tmp_path.glob(".report*")) == []


HANGING = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

class Slow(TensorDataset):
    def __getitem__(self, index):
        if index == 14:
            time.sleep(60)  # on the rank that has this row
        return super().__getitem__(index)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for (x,) in DataLoader(Slow(torch.randn(32, 4)), batch_size=8):
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_the_report_of_a_hang_has_both_stacks(flow: Flow, tmp_path: Path) -> None:
    script, report = flow.write("train.py", HANGING), tmp_path / "report.html"
    words = ["--timeout", "2", "--step-timeout", "2", "--report", report]
    result = flow.run(["run", "--quiet", "--devices", "cpu:2", *words, script])
    text = report.read_text()
    assert "rank 1 did not come</summary>" in text, result
    assert "line 9 in __getitem__" in text
    assert "rank 0 is at (innermost first):" in text
    assert "line 15 in &lt;module&gt;" in text


def test_a_report_that_cannot_be_written(flow: Flow, tmp_path: Path) -> None:
    script = flow.write("train.py", "print(1)")
    for path in (tmp_path / "missing" / "report.html", tmp_path / "report.pdf"):
        result = flow.run(["run", "--report", path, script])
        assert (result.returncode, result.stdout) == (2, "")
        allowed = (
            "in a directory that exists" if path.suffix == ".html" else "the path of a file that ends with .html"
        )
        assert f"--report must be {allowed}" in result.stderr


def test_watching_a_run_of_one_device(flow: Flow, tmp_path: Path) -> None:
    """The script runs in the command's own process, and its steps are seen all the same."""
    script, stop = flow.write("train.py", f"{TRAINING}\nraise ValueError('boom')"), tmp_path / "stop"
    run = flow.start(["run", "--quiet", "--devices", "cpu", script, stop])
    while not run.stdout():
        time.sleep(0.05)
    watching = flow.start(["watch", "--json", str(run.pid)])
    while not any(look["steps_per_second"] for look in looks(watching.stdout())):
        time.sleep(0.05)
    stop.touch()
    result = run.wait()
    *before, end = looks(watching.wait().ok().stdout)
    assert (end["event"], end["code"], end["faults"]) == ("end", 1, ["the script raised ValueError: boom"])
    look = next(look for look in before if look["steps_per_second"])
    (one,) = look["ranks"]
    assert one["parts"]["waiting"] is None
    assert 0 < one["parts"]["loading"] < 1
    assert look["position"]["batches"] == 8
    assert look["lines"] == result.stdout.splitlines()
