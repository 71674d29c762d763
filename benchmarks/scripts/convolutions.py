"""A plain script whose steps are nearly all convolutions: what `--strategy exact` costs beside `ddp`."""

import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,))


def block(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


model = nn.Sequential(
    *block(3, 32),
    *block(32, 64),
    nn.MaxPool2d(2),
    *block(64, 128),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
times = []
for _ in range(3):
    for a, b in DataLoader(TensorDataset(x, y), 64, shuffle=True):
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
print(1e3 * sorted(times[4:])[len(times[4:]) // 2])
