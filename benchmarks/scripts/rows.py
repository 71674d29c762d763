"""A CNN's step on workers of different speed: `rows.py CLOCK MODEL BATCH SKIPPED STEPS GROUP...`, one for each rank.

Prints the mean time of the steps in milliseconds, by this function of `time`.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import duoka

# Channels of convolutions, and 0 for a maximum of 2x2 pixels, from 3x32x32 to 8x8 pixels.
MODELS = {"small": [32, 0, 64, 64, 64, 64, 0], "large": [0, 64, 64, 64, 0, 128, 128, 128]}

clock = getattr(time, sys.argv[1])
batch, skipped, steps = map(int, sys.argv[3:6])
run = duoka.start(seed=0)
Path(sys.argv[6 + run.rank], "cgroup.procs").write_text(str(os.getpid()))
layers: list[nn.Module] = []
width = 3
for channels in MODELS[sys.argv[2]]:
    layers += [nn.Conv2d(width, channels, 3, padding=1), nn.ReLU()] if channels else [nn.MaxPool2d(2)]
    width = channels or width
model = run.model(nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 8 * 8, 10)))
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
