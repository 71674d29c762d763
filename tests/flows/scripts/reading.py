"""Loaders of all sorts: dicts, worker processes, persistent ones, random augmentation, a sampler, drop_last."""

import random
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)


class Samples(Dataset):
    def __init__(self, noise):
        self.x = torch.randn(90, 8)
        self.noise = noise

    def __len__(self):
        return 90

    def __getitem__(self, index):
        x = self.x[index]
        if self.noise:
            x = x + 0.1 * torch.randn(8) + 0.01 * random.random() + 0.01 * np.random.rand()
        return {"x": x, "y": int(self.x[index].sum() > 0), "both": (index, np.float32(index))}


def pad(samples):
    return torch.stack([sample["x"] for sample in samples]), torch.tensor([sample["y"] for sample in samples])


model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(loader):
    total = 0
    for batch in loader:
        x, y = batch if isinstance(batch, (list, tuple)) else (batch["x"], batch["y"])
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(len(loader), f"{total:.4f}", tuple(x.shape))


weights = torch.rand(90)
for noise in (False, True):
    for workers in (0, 2):
        how = {"multiprocessing_context": "fork"} if workers else {}  # Python 3.14's own way wants a guarded main
        loader = DataLoader(Samples(noise), 25, True, num_workers=workers, persistent_workers=workers > 0, **how)
        for _ in range(2):
            train(loader)
train(DataLoader(Samples(False), 16, sampler=WeightedRandomSampler(weights, 60), drop_last=True))
train(DataLoader(Samples(False), 16, collate_fn=pad, shuffle=True))
torch.save(model.state_dict(), sys.argv[1])
