"""A training step on GPUs: `cuda_step.py mlp|cnn [dp|ddp]`. Prints the median milliseconds.

A plain script; with dp its model is in nn.DataParallel, with ddp it does its own DistributedDataParallel. Without a
GPU it runs on the CPU, so that it is tested everywhere.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(os.environ.get("STEPS", "100"))
WARM_UP = min(10, STEPS)
how = sys.argv[2] if len(sys.argv) > 2 else "plain"
on_gpu = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
rank, world_size = 0, 1
if how == "ddp":
    if on_gpu:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
if sys.argv[1] == "mlp":
    size, x = 1024, torch.randn(1024 * 4, 784)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
else:
    size, x = 256, torch.randn(256 * 4, 3, 64, 64)
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16 * 16, 10))
batches = list(DataLoader(TensorDataset(x, torch.randint(0, 10, (len(x),))), batch_size=size))
if how == "ddp":  # its rows of every batch
    batches = [tuple(part.chunk(world_size)[rank] for part in batch) for batch in batches]
model = model.to(device)
if how == "dp":
    model = nn.DataParallel(model)
elif how == "ddp":
    model = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model) if on_gpu else model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

times = []
for step in range(WARM_UP + STEPS):
    inputs, targets = batches[step % 4]
    start = time.perf_counter()
    inputs, targets = inputs.to(device), targets.to(device)
    loss = F.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    reported = loss.detach().clone()
    if how == "ddp":
        dist.all_reduce(reported)
    reported = reported.item() / world_size  # waits for the GPU
    times.append(time.perf_counter() - start)
if rank == 0:
    print(statistics.median(times[WARM_UP:]) * 1e3)
if how == "ddp":
    del model
    dist.destroy_process_group()
