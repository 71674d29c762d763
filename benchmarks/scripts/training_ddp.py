"""The same step by hand, with DistributedDataParallel; it reports the whole batch's loss and accuracy, too."""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
if sys.argv[1] == "mlp":
    size, steps, x = 256, 300, torch.randn(256 * 8, 64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
else:
    size, steps, x = 64, 60, torch.randn(64 * 8, 3, 32, 32)
    convolutions = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 8 * 8, 10))
y = torch.randint(0, 10, (len(x),))
share = size // world_size
starts = [number * size + rank * share for number in range(8)]
batches = [(x[start : start + share], y[start : start + share]) for start in starts]
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

times = []
for step in range(10 + steps):
    inputs, targets = batches[step % 8]
    start = time.perf_counter()
    scores = model(inputs)
    loss = F.cross_entropy(scores, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    report = torch.stack([loss.detach(), (scores.argmax(1) == targets).float().mean()])
    dist.all_reduce(report)
    reported = (report / world_size).tolist()
    times.append(time.perf_counter() - start)
if rank == 0:
    print(statistics.median(times[10:]) * 1e3)
dist.destroy_process_group()
