"""Shares of a batch that follow the speed of each rank."""

from __future__ import annotations

import re

from tests.flows.flow import Flow

SCRIPT = """
import sys, time
import torch
from torch import nn
import duoka

run = duoka.start(seed=0, rows="auto")
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
model = run.model(net.double())
optimizer = torch.optim.SGD(model.parameters(), 0.05)
data = torch.randn(16 * 60 + 5, 8, dtype=torch.float64)
for step, (x,) in enumerate(run.loader(torch.utils.data.TensorDataset(data), batch_size=16, shuffle=True)):
    if run.rank == 1:
        time.sleep(0.002 * x.to_local().shape[0])  # a slow device
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
    shares = re.search(r"rows (\d+) \+ (\d+) of 16 \(.* : 1, measured after 43 steps\)", result.stderr)
    assert shares is not None, result.stderr
    assert int(shares[1]) > int(shares[2])
