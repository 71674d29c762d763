"""A loop over Fabric's objects."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(5)
x = torch.randn(103, 8)
train = fabric.setup_dataloaders(DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 16, shuffle=True))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for epoch in range(3):
    total = 0.0
    for rows, labels in train:
        loss = nn.functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        total += loss.item()
    fabric.print(epoch, f"{total:.6f} {fabric.all_reduce(loss.detach()).item():.6f}")
state = {"model": model, "optimizer": optimizer}
fabric.save("model.ckpt", state)
fabric.load("model.ckpt", state)
print(f"{sum(p.sum().item() for p in model.parameters()):.6f}")
