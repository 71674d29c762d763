"""Scripts with their own torch.distributed that save, are asked to end, are killed, and go on."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable

import pytest
from safetensors.torch import load_file

from tests.flows.flow import Flow, Running
from tests.flows.group import until
from tests.flows.reference import NUDGED
from tests.flows.test_restarts import children
from tests.rounding import assert_same

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import duoka

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with duoka.Checkpoint("out", {"model": model, "optimizer": optimizer}, every_steps=1) as saved:
    saved.restore()
    if dist.get_rank() == 0:
        print("from", saved.step_number, flush=True)
    while saved.step_number < 8:
        loss = model(torch.randn(6, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        saved.step()
        if dist.get_rank() == 0:
            print(saved.step_number, loss.item(), flush=True)
        time.sleep(float(sys.argv[1]))
"""


def run(flow: Flow, workers: int, pause: float) -> list[str | int]:
    return ["run", "--quiet", "--devices", f"cpu:{workers}", flow.write("train.py", SCRIPT), str(pause)]  # type: ignore[list-item]


@pytest.mark.cpu_and_cards(long=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_goes_on_with_other_ranks(number: signal.Signals, flow: Flow) -> None:
    running = flow.start(run(flow, 2, 0.2))  # type: ignore[arg-type]
    until(lambda: "\n3 " in running.stdout())
    running.send(number)
    ended = running.wait()
    assert ended.returncode == (75 if number == signal.SIGTERM else 137), ended
    again = flow.run(run(flow, 3, 0)).ok()  # type: ignore[arg-type]
    first, *rest = again.stdout.splitlines()
    assert int(first.split()[1]) >= 2
    assert rest[-1].startswith("8 ")


PLAIN = """
import sys, time
import torch
import duoka

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saved = duoka.Checkpoint("out", {"model": model, "optimizer": optimizer}, every_epochs=None)
for epoch in saved.epochs(1):
    while saved.step_number < 8:
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        saved.step()
        print(saved.step_number, flush=True)
        time.sleep(float(sys.argv[1]))
"""
KINDS = {"plain": PLAIN, "distributed": SCRIPT.replace(", every_steps=1", "")}


def to_all(running: Running) -> None:
    """As Slurm does with `--signal=USR1@60`, to every process of a job's step; several times, in any order."""
    for _ in range(3):
        for pid in (*children(running.pid), running.pid):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.002)


def to_the_command(running: Running) -> None:
    """As with `--signal=B:USR1@60` and `exec duoka run`, and twice."""
    running.send(signal.SIGUSR1)
    running.send(signal.SIGUSR1)


@pytest.mark.cpu_and_cards(long=True)
@pytest.mark.parametrize("send", [to_all, to_the_command])
@pytest.mark.parametrize(("kind", "workers"), [("plain", 1), ("plain", 3), ("distributed", 2)])
def test_a_scheduler_s_warning_is_answered_by_a_save_and_exit_code_75(
    kind: str, workers: int, send: Callable[[Running], None], flow: Flow
) -> None:
    script = flow.write("train.py", KINDS[kind])
    running = flow.start(["run", "--quiet", "--restarts", "1", "--devices", f"cpu:{workers}", script, "0.15"])
    until(lambda: "\n3" in running.stdout())
    send(running)
    ended = running.wait()
    assert ended.returncode == 75, ended
    (step,) = (flow.folder / "out").glob("step-*")
    said = [int(line.split()[0]) for line in ended.stdout.splitlines() if line[0].isdigit()]
    assert int(step.name[5:]) in (said[-1], said[-1] + 1)
    assert "restart" not in ended.stderr


SHARDED = """
import sys
import torch, torch.distributed as dist
import duoka
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

dist.init_process_group("gloo")
strategy, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
x = torch.randn(12, 5)
if strategy == "fsdp":
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
with duoka.Checkpoint("out", {"model": model, "optimizer": optimizer}, every_steps=1) as saved:
    saved.restore()
    while saved.step_number < steps:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        saved.step()
        if dist.get_rank() == 0:
            print(saved.step_number, f"{loss.item():.6f}", flush=True)
duoka.save_weights(model, "weights.safetensors")
assert strategy != "fsdp" or isinstance(model[0].weight, DTensor)
assert duoka.load_weights(model, "weights.safetensors").loaded
duoka.save_weights(model, "again.safetensors")
"""


@pytest.mark.long  # importing FSDP takes each worker seconds; on simulated cards gloo cannot read their memory
def test_sharded_parameters_go_on_whole_and_on_other_ranks(flow: Flow) -> None:
    script = flow.write("train.py", SHARDED)
    lines = []
    for strategy, workers, steps in (("fsdp", 2, 2), ("plain", 1, 3), ("fsdp", 3, 5), ("plain", 2, 6)):
        done = flow.run(["run", "--quiet", "--devices", f"cpu:{workers}", script, strategy, str(steps)]).ok()
        lines += done.stdout.splitlines()
        first, again = (load_file(flow.folder / f"{name}.safetensors") for name in ("weights", "again"))
        assert first.keys() == again.keys()
        assert all(first[name].shape == again[name].shape and (first[name] == again[name]).all() for name in first)

    def whole(prepare: str) -> list[str]:
        shutil.rmtree(flow.folder / "out")
        words = ["run", "--quiet", "--devices", "cpu:1", script, "plain", "6"]
        return flow.run(words, prepare=prepare).ok().stdout.splitlines()

    assert_same(whole(""), lines, lambda seed: whole(NUDGED.format(seed=seed)))
