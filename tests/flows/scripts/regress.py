"""Batches of 16 out of 97 samples: the last one has a single sample, fewer than workers."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(97, 5)
loader = DataLoader(TensorDataset(x, x @ torch.randn(5, 1)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{len(x)} {loss.item():.5f} {loss:.4f}")
torch.save(model.state_dict(), sys.argv[1])
