"""A CNN's step on workers of different speed: `rows.py CLOCK BATCH SKIPPED STEPS GROUP...`, a group for each rank.

Prints the mean time of the steps in milliseconds, by this function of `time`.
"""

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import duoka

clock = getattr(time, sys.argv[1])
batch, skipped, steps = map(int, sys.argv[2:5])
run = duoka.start(seed=0)
Path(sys.argv[5 + run.rank], "cgroup.procs").write_text(str(os.getpid()))
channels = 3, 32, 64, 64, 64, 64
layers: list[nn.Module] = []
for number, (before, after) in enumerate(pairwise(channels)):
    layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), *[nn.MaxPool2d(2)] * (number in (0, 4))]
model = run.model(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 8 * 8, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = batch * (skipped + steps)
images, labels = torch.randn(1, 3, 32, 32).expand(rows, 3, 32, 32), torch.randint(0, 10, (rows,))
begun = 0.0
for step, (inputs, targets) in enumerate(run.loader((images, labels), batch_size=batch)):
    if step == skipped:
        begun = clock()
    loss = F.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
run.print((clock() - begun) / steps * 1e3)
