"""Data in memory in batches of 64: `loading.py duoka|torch floats|images`. Prints microseconds for a batch."""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import duoka

who, what = sys.argv[1:]
n = 64 * 300
x = torch.randn(n, 64) if what == "floats" else torch.randint(0, 256, (n, 28, 28), dtype=torch.uint8)
data = TensorDataset(x, torch.arange(n))
with duoka.start(seed=0) as run:
    loader = run.loader(data, batch_size=64, shuffle=True) if who == "duoka" else DataLoader(data, 64, shuffle=True)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for inputs, _targets in loader:
            if what == "images":  # a transform of the whole batch
                inputs = inputs.float().div_(255).sub_(0.1307).div_(0.3081)
        times.append(time.perf_counter() - start)
print(min(times[1:]) / 300 * 1e6)
