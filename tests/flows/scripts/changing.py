"""Models that do something else later than at first, or for some batches only, and that look beside themselves.

Rescaling and fake quantisation that begin when activations have grown, a warm-up, a flag that the trainer sets, a
dropout raised on a schedule, generators and schedules beside the model, BatchNorm of a part of the rows, of a
parameter, of pieces and for each domain, counters in forward.
"""

import itertools
import random
import sys
from collections import Counter, defaultdict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
features = torch.randn(57, 8)
features[::9] *= 6  # outliers
data = TensorDataset(features, (features.sum(1) > 0).long(), torch.arange(57) % 3)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 2)
        self.steps = 0
        self.more()

    def more(self):
        pass

    def forward(self, x, domain):
        self.steps += 1
        return self.last(torch.tanh(self.inner(self.first(x), domain)))


class Rescaled(Base):
    def inner(self, h, domain):
        return h / h.abs().max().clamp(min=3)


class FakeQuantised(Base):
    def inner(self, h, domain):
        scale = h.detach().abs().amax().clamp(min=8) / 127
        return h + ((h / scale).round() * scale - h).detach()


class WarmedUp(Base):
    def inner(self, h, domain):
        if self.steps > 10:
            h = h - h.mean(0)
        return h


class Centred(Base):
    centre = False

    def inner(self, h, domain):
        return h - h.mean(0) if self.centre else h


class Scheduled(Base):
    def more(self):
        self.raised, self.fixed = nn.Dropout(0.0), nn.Dropout(0.2)

    def inner(self, h, domain):
        return self.fixed(self.raised(h))


class Beside(Base):
    def inner(self, h, domain):
        noise = torch.rand((), generator=torchs) + float(numpys.random()) + pythons.random()
        return F.dropout(h, next(rates)) * (1 + 0.1 * noise)


class MaskedNorm(Base):
    def more(self):
        self.norm = nn.BatchNorm1d(12)

    def inner(self, h, domain):
        out = h.clone()
        mask = h[:, 0] > h[:, 0].median()
        out[mask] = self.norm(h[mask])
        return out


class PrototypeNorm(Base):
    def more(self):
        self.norm = nn.BatchNorm1d(12)
        self.prototypes = nn.Parameter(torch.randn(6, 12) / 4)

    def inner(self, h, domain):
        return h @ self.norm(self.prototypes).t() @ self.prototypes


class GhostNorm(Base):
    def more(self):
        self.norm = nn.BatchNorm1d(12)

    def inner(self, h, domain):
        return torch.cat([self.norm(piece) for piece in h.split(6)])


class DomainNorm(Base):
    def more(self):
        self.norms = nn.ModuleList(nn.BatchNorm1d(12) for _ in range(3))

    def inner(self, h, domain):
        out = torch.zeros_like(h)
        for index, norm in enumerate(self.norms):
            out[domain == index] = norm(h[domain == index])
        return out


class Counting(Base):
    def more(self):
        self.met, self.sizes = Counter(), defaultdict(int)
        self.seen = 0

    def inner(self, h, domain):
        self.met["samples"] += len(h)
        self.sizes[h.shape[0]] += 1
        self.seen += h.size(0)
        return h * (1 - 1 / (10 + self.seen))


saved = {}
for kind in (
    *(Rescaled, FakeQuantised, WarmedUp, Centred, Scheduled, Beside),
    *(MaskedNorm, PrototypeNorm, GhostNorm, DomainNorm, Counting),
):
    torch.manual_seed(1)
    torchs, numpys, pythons = torch.Generator().manual_seed(2), np.random.default_rng(2), random.Random(2)
    rates = itertools.cycle([0.1, 0.0, 0.3])
    net = kind()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    for epoch in range(4):
        total, right = 0.0, 0
        for x, y, domain in DataLoader(data, batch_size=16, shuffle=True):  # the last has 9
            logits = net(x, domain)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            right += (logits.argmax(1) == y).sum().item()
        print(kind.__name__, epoch, f"{total:.4f}", right)
        net.centre = True
        if kind is Scheduled:
            net.raised.p += 0.1
    if kind is Beside:
        print(f"{torch.rand((), generator=torchs):.4f} {numpys.random():.4f} {pythons.random():.4f} {next(rates)}")
    if kind is Counting:
        print(dict(net.met), dict(net.sizes), net.seen)
    saved[kind.__name__] = net.state_dict()
torch.save(saved, sys.argv[1])
