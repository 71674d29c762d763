"""Shares of a batch that follow the speed of each rank."""

from __future__ import annotations

import re

import pytest

from tests.flows.flow import Flow

# The clock by which ranks measure their steps counts rows, so that no load of the machine decides.
SCRIPT = """
import torch
from torch import nn
import duoka
from duoka.strategies import balancing

run = duoka.start(seed=0, rows="auto")
computed = 0
balancing.monotonic_ns = lambda: computed + run._session.ranks.waited
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = run.model(net.double())
optimizer = torch.optim.SGD(model.parameters(), 0.05)
data = torch.randn(16 * 60 + 5, 8, dtype=torch.float64)
for step, (x,) in enumerate(run.loader(torch.utils.data.TensorDataset(data), batch_size=16, shuffle=True)):
    if run.world_size > 1:
        computed += (1 + 2 * run.rank) * 1_000_000 * x.to_local().shape[0]  # rank 1 takes three times as long
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.print(f"{loss.item():.6f}")
"""


def test_a_slow_rank_gets_fewer_rows_and_no_number_changes(flow: Flow) -> None:
    script = flow.write("script.py", SCRIPT)
    alone = flow.run(["run", "--devices", "cpu:1", script]).ok()
    result = flow.run(["run", "--devices", "cpu:2", script]).ok()
    assert result.stdout == alone.stdout
    assert "duoka: rows 12 + 4 of 16 (3 : 1, measured after 43 steps)\n" in result.stderr


FAULTY = """
import os
import torch
from torch import nn
import duoka

run = duoka.start(seed=0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
model = run.model(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)
for step, (x, y) in enumerate(run.loader(torch.utils.data.TensorDataset(x, y), batch_size=10, shuffle=True)):
    if step == 2 and run.world_size > 1 and run.rank == 1 and {when}:
        raise RuntimeError("{error}")
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.print(f"{{loss.item():.8f}}")
"""


@pytest.mark.cpu_and_cards
@pytest.mark.parametrize(
    ("rows", "when", "error", "told"),
    [
        (
            "1:3:1",
            'os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"',
            "CUDA error: uncorrectable ECC error encountered",
            "{device} of rank 1 is lost, and left out from now on",
        ),
        (
            "auto",
            "len(x.to_local()) > 2",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
            "memory ran out on rank 1: the next attempt begins with --rows 1.43:1:1.9",
        ),
    ],
)
def test_a_run_goes_on_without_what_was_lost(flow: Flow, rows: str, when: str, error: str, told: str) -> None:
    script = flow.write("script.py", FAULTY.format(when=when, error=error))
    alone = flow.run(["run", "--devices", "cpu:1", script]).ok().stdout
    result = flow.run(["run", "--rows", rows, "--devices", "cpu:3", "--restarts", "2", script]).ok()
    assert result.stdout.endswith(alone)
    told = told.format(device="GPU 1" if flow.cards else "CPU")
    assert f"duoka: {told}\n" in re.sub(r"(GPU \d) \(.*?\)", r"\1", result.stderr)
