"""Models whose forward pass has to do with what lies beside their inputs and parameters.

A contrastive model with a slow copy and a queue, a codebook that follows its batches, factors and a gate that are no
parameters, hooks and branches in forward, counters and lists in global variables.
"""

import copy
import random
import sys

import torch
from torch import nn
from torch.nn import functional as F

SEEN = 0
NORMS = []
KEPT = []


class Contrast(nn.Module):
    """Keys by a slow copy of the encoder; negatives from a queue (as momentum contrast has it)."""

    def __init__(self):
        super().__init__()
        self.fast = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8))
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, 40), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters()):
            slow.data = slow.data * 0.9 + fast.data * 0.1

    @torch.no_grad()
    def enqueue(self, keys):
        at, n = int(self.at), keys.shape[0]
        self.queue[:, at : at + n] = keys.T
        self.at[0] = (at + n) % 40

    def forward(self, one, other):
        q = F.normalize(self.fast(one), dim=1)
        with torch.no_grad():
            self.follow()
            k = F.normalize(self.slow(other), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone().detach()
        self.enqueue(k)
        return torch.cat([positive, negative], 1) / 0.2, torch.zeros(len(q), dtype=torch.long)


class Codes(nn.Module):
    """The nearest of some vectors, which follow what they stand for; gradients pass straight through."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(10, 4), nn.Linear(4, 10)
        self.codes = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.counts = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x):
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 6).float()
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.lerp_(hot.T @ z / self.counts[:, None], 0.1)
        coded = self.codes[nearest]
        return self.decode(z + (coded - z).detach()), F.mse_loss(z, coded)


class Gated(nn.Module):
    """With a factor that is no parameter, weights computed elsewhere, and much that it does on the side."""

    def __init__(self, factor):
        super().__init__()
        self.layer, self.out = nn.Linear(10, 10), nn.Linear(10, 1)
        self.factor, self.gate, self.norms = factor, None, []

    def forward(self, x):
        global SEEN
        SEEN += len(x)
        h = torch.tanh(self.layer(x)) * self.factor
        if self.gate is not None:
            h = h * self.gate
        if h.requires_grad:
            h.register_hook(lambda grad: NORMS.append(grad.norm().item()))
            h.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        if h.abs().max() > 2.5:
            h = h / h.abs().max()
        KEPT.append(h.detach().mean(0))
        return self.out(h)


class Skipping(nn.Module):
    """Layers that are skipped at random, whole: each of them drops out."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(10, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if not self.training or random.random() < 0.5:
                x = x + layer(x)
        return self.last(x)


torch.manual_seed(3)
random.seed(3)
data = torch.randn(37, 10)
views = torch.stack([data + 0.1 * torch.randn(37, 10), data + 0.1 * torch.randn(37, 10)], 1)

contrast = Contrast()
optimizer = torch.optim.SGD(contrast.fast.parameters(), lr=0.1)
for epoch in range(3):
    for batch in torch.utils.data.DataLoader(views, batch_size=8, shuffle=True, drop_last=True):
        logits, labels = contrast(batch[:, 0], batch[:, 1])
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"contrast {epoch}: {loss.item():.5f}, queue at {int(contrast.at)}, {contrast.queue.sum():.4f}")

codes = Codes()
optimizer = torch.optim.Adam([p for p in codes.parameters() if p.requires_grad], lr=0.01)
for epoch in range(3):
    for batch in torch.utils.data.DataLoader(data, batch_size=10):
        out, commitment = codes(batch)
        loss = F.mse_loss(out, batch) + 0.25 * commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"codes {epoch}: {loss.item():.5f}, {codes.codes.norm():.5f}, {codes.counts.tolist()}")

factor = torch.full((10,), 2.0, requires_grad=True)
source = torch.randn(10, requires_grad=True)
gated = Gated(factor)
optimizer = torch.optim.SGD(gated.parameters(), lr=0.2)
for epoch in range(3):
    for batch in torch.utils.data.DataLoader(data, batch_size=9):
        gated.gate = torch.sigmoid(source) if epoch else None
        loss = (gated(batch * (1 + epoch)) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        factor.grad = source.grad = None
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            factor -= 0.1 * factor.grad
            if source.grad is not None:
                source -= 0.1 * source.grad
    print(f"gated {epoch}: {loss.item():.5f}, seen {SEEN}, {len(NORMS)} norms, the last {NORMS[-1]:.5f}")
    print(f"  {len(KEPT)} kept, {torch.stack(KEPT).sum():.4f}; factor {factor.sum():.5f}, source {source.sum():.5f}")

skipping = Skipping()
optimizer = torch.optim.SGD(skipping.parameters(), lr=0.1)
for epoch in range(3):
    for batch in torch.utils.data.DataLoader(data, batch_size=9):
        loss = (skipping(batch) - batch.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"skipping {epoch}: {loss.item():.5f}")

torch.save(
    [m.state_dict() for m in (contrast, codes, gated, skipping)] + [factor.detach(), source.detach()], sys.argv[1]
)
