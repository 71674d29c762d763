"""No loader at all: batches indexed by hand, mixup, raw parameters updated by hand, LBFGS on the whole data."""

import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
np.random.seed(0)
x = torch.randn(150, 8)
y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, affine=False), nn.ReLU(), nn.Linear(16, 2))
scale = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    order = torch.randperm(150)
    total = 0
    for start in range(0, 150, 32):
        chosen = order[start : start + 32]
        inputs, targets = x[chosen], y[chosen]
        other = torch.randperm(len(inputs))
        lam = np.random.beta(1, 1)
        scores = model(lam * inputs + (1 - lam) * inputs[other]) * scale
        loss = lam * F.cross_entropy(scores, targets) + (1 - lam) * F.cross_entropy(scores, targets[other])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            scale -= 0.1 * scale.grad
        scale.grad = None
        total += loss.item()
    print(epoch, f"{total:.4f}", [f"{value:.4f}" for value in scale.tolist()])

line = nn.Linear(8, 1)
solver = torch.optim.LBFGS(line.parameters(), lr=0.5, max_iter=4)


def closure():
    solver.zero_grad()
    loss = F.mse_loss(line(x), x.sum(1, keepdim=True) + 1)
    loss.backward()
    return loss


for _ in range(2):
    print(f"{solver.step(closure).item():.4f}")
torch.save([model.state_dict(), scale.detach(), line.state_dict()], sys.argv[1])
