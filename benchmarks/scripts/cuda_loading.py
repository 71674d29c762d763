"""Batches of 256 images to the GPU: `cuda_loading.py duoka|torch`. Prints microseconds for a batch.

Without a GPU they stay on the CPU, so that it is tested everywhere.
"""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import duoka

BATCHES = int(os.environ.get("STEPS", "40"))
on_gpu = torch.accelerator.is_available()
data = TensorDataset(torch.rand(256 * BATCHES, 3, 64, 64), torch.arange(256 * BATCHES))
with duoka.start(seed=0) as run:
    if sys.argv[1] == "duoka":
        loader = run.loader(data, batch_size=256, shuffle=True)
    else:
        loader = DataLoader(data, batch_size=256, shuffle=True, pin_memory=on_gpu)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        for inputs, targets in loader:
            inputs, targets = inputs.to(run.device, non_blocking=True), targets.to(run.device, non_blocking=True)
            total = inputs.sum()
        total.item()  # waits for the GPU
        times.append(time.perf_counter() - start)
    run.print(min(times[1:]) / BATCHES * 1e6)
