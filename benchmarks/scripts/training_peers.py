"""The same step with a peer: `training_peers.py accelerate|fabric mlp|cnn`; it reports the same numbers, too."""

import os
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(0)
if sys.argv[2] == "mlp":
    size, steps, x = 256, 300, torch.randn(256 * 8, 64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
else:
    size, steps, x = 64, 60, torch.randn(64 * 8, 3, 32, 32)
    convolutions = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 8 * 8, 10))
y = torch.randint(0, 10, (len(x),))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

if sys.argv[1] == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    model, optimizer = accelerator.prepare(model, optimizer)
    backward, mean = accelerator.backward, lambda report: accelerator.reduce(report, "mean")
else:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    rank, world_size = fabric.global_rank, fabric.world_size
    model, optimizer = fabric.setup(model, optimizer)
    backward, mean = fabric.backward, lambda report: fabric.all_reduce(report, reduce_op="mean")

share = size // world_size
starts = [number * size + rank * share for number in range(8)]
batches = [(x[start : start + share], y[start : start + share]) for start in starts]

times = []
for step in range(10 + steps):
    inputs, targets = batches[step % 8]
    start = time.perf_counter()
    scores = model(inputs)
    loss = F.cross_entropy(scores, targets)
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    report = torch.stack([loss.detach(), (scores.argmax(1) == targets).float().mean()])
    reported = mean(report).tolist()
    times.append(time.perf_counter() - start)
if rank == 0:
    print(statistics.median(times[10:]) * 1e3)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # taking python down after gloo ends in an abort now and then (torch 2.13)
