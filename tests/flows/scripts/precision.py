"""Autocast and GradScaler on the CPU, accumulated, clipped; then saved, and resumed in the same script."""

import copy
import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(140, 10)
data = TensorDataset(x, (x[:, 0] * 3).long().clamp(-1, 1) + 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(10, 24), nn.LayerNorm(24), nn.Linear(24, 3)
        self.drop = nn.Dropout(0.2)

    def body(self, x):
        return self.drop(F.gelu(self.norm(self.first(x))))

    def forward(self, x):
        return self.last(checkpoint(self.body, x, use_reentrant=False))


class Average:
    def __init__(self, model, decay):
        self.model, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for mean, now in zip(self.model.state_dict().values(), model.state_dict().values()):
            mean.lerp_(now, 1 - self.decay)


model = Net()
average = Average(model, 0.9)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=20)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)


def train(epochs):
    for epoch in epochs:
        model.train()
        total = 0
        for step, (x, y) in enumerate(DataLoader(data, batch_size=20, shuffle=True)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=epoch == 99):
                loss = F.cross_entropy(model(x), y) / 2
            scaler.scale(loss).backward()
            if step % 2 == 1:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                average.update(model)
                scheduler.step()
            total += loss.item()
        print(epoch, f"{total:.4f} {norm:.4f} {scaler.get_scale()} {scheduler.get_last_lr()[0]:.6f}")


path = os.path.join(tempfile.mkdtemp(), "state.pt")
train(range(2))
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "average": average.model}
torch.save({name: part.state_dict() for name, part in parts.items()} | {"rng": torch.get_rng_state()}, path)
train(range(2, 4))
saved = torch.load(path)
for name, part in parts.items():
    part.load_state_dict(saved[name])
torch.set_rng_state(saved["rng"])
train(range(2, 4))
print(f"{sum(p.norm() for p in average.model.parameters()).item():.4f}", os.path.exists(path))
torch.save(
    [model.state_dict(), average.model.state_dict(), optimizer.state_dict()["state"][0]["exp_avg"]], sys.argv[1]
)
