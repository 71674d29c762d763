"""The same step with duoka's API: `training_api.py mlp|cnn`. Prints the median milliseconds."""

import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import duoka

run = duoka.start(seed=0)
if sys.argv[1] == "mlp":
    size, steps, x = 256, 300, torch.randn(256 * 8, 64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
else:
    size, steps, x = 64, 60, torch.randn(64 * 8, 3, 32, 32)
    convolutions = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 8 * 8, 10))
run.model(model)
data = TensorDataset(x, torch.randint(0, 10, (len(x),)))
batches = list(run.loader(data, batch_size=size))
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
    accuracy = (scores.argmax(1) == targets).float().mean()
    reported = loss.item(), accuracy.item()
    times.append(time.perf_counter() - start)
run.print(statistics.median(times[10:]) * 1e3)
