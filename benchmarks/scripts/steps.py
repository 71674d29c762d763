"""A plain script that trains a small network, and prints how many microseconds a step takes (the median)."""

import statistics
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
times = []
for _ in range(10):
    begin = time.perf_counter()
    for images, labels in DataLoader(data, batch_size=64, shuffle=True):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        times.append(now - begin)
        begin = now
print(statistics.median(times) * 1e6)
