"""A plain script that trains a small network, and reports no, one or two numbers of each step.

Prints how many milliseconds a step takes (the median) in each of the three cases.
"""

import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = TensorDataset(torch.randn(128 * 10, 32), torch.randint(10, (128 * 10,)))
medians = []
for reports in ("none", "loss", "all"):
    times = []
    for _ in range(4):
        loader = iter(DataLoader(data, batch_size=128, shuffle=True))
        begin = time.clock_gettime(time.CLOCK_MONOTONIC)
        for x, y in loader:
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            optimizer.zero_grad()
            loss.backward()
            if reports == "all":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if reports != "none":
                loss.item()
            if reports == "all":
                (scores.argmax(1) == y).float().mean().item()
            now = time.clock_gettime(time.CLOCK_MONOTONIC)  # rank 0's own: its like would cost a message
            times.append(now - begin)
            begin = now
    medians.append(statistics.median(times[10:]) * 1e3)
print(*medians)
