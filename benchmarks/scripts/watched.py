"""Train with steps of about 1 ms until standard input ends; print the median step of each quarter of a second.

A line is `when microseconds`: CLOCK_MONOTONIC at its end.
"""

from __future__ import annotations

import select
import statistics
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BLOCK = 0.25  # seconds

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(4096, 256), torch.randint(10, (4096,)))
loader = DataLoader(data, batch_sampler=[list(range(start, start + 64)) for start in range(0, 4096, 64)])
times: list[float] = []
begun = before = time.perf_counter()
for _ in range(1_000_000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        times.append(now - before)
        if now - begun > BLOCK:
            print(f"{time.monotonic()} {1e6 * statistics.median(times)}", flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                sys.exit()
            times.clear()
            now = begun = time.perf_counter()
        before = now
