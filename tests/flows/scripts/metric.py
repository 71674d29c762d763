"""Batch-hard triplets, NT-Xent over two views, a memory of earlier features, nearest neighbours of all of it."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
labels = torch.arange(120) % 5
centres = torch.randn(5, 8) * 2
data = TensorDataset(centres[labels] + torch.randn(120, 8), labels)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def batch_hard(features, labels, margin=0.5):
    distance = torch.cdist(features, features)
    same = labels[:, None] == labels[None, :]
    furthest = (distance * same).max(1).values
    nearest = distance.masked_fill(same, float("inf")).min(1)[0]
    active = (furthest - nearest + margin) > 0
    return F.relu(furthest - nearest + margin).mean(), active.float().mean()


def contrast(one, other, temperature=0.5):
    z = F.normalize(torch.cat([one, other]), dim=1)
    n = len(one)
    likeness = z @ z.t() / temperature
    likeness = likeness.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(likeness, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


memory, remembered = [], []
for epoch in range(2):
    total, shares = 0, []
    for x, y in DataLoader(data, batch_size=30, shuffle=True):
        features = model(x)
        hard, share = batch_hard(features, y)
        views = model(torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)]))
        one, other = views.chunk(2)
        anchor, positive, negative = features, other, features.roll(1, 0)
        triplets = F.triplet_margin_loss(anchor, positive, negative)
        pairs = F.cosine_embedding_loss(features, other.detach(), torch.where(y > 1, 1.0, -1.0))
        loss = hard + 0.3 * contrast(one, other) + 0.1 * triplets + 0.1 * pairs
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        shares.append(share)
        memory.append(features.detach())
        remembered.append(y)
    print(epoch, f"{total:.4f}", f"{torch.stack(shares).mean():.3f}")
features, known = torch.cat(memory[-4:]), torch.cat(remembered[-4:])
nearest = torch.cdist(features, features).topk(4, largest=False).indices[:, 1:]
votes = torch.mode(known[nearest], dim=1).values
print((votes == known).float().mean().item(), known.bincount(minlength=5).tolist())
torch.save(model.state_dict(), sys.argv[1])
