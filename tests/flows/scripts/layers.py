"""Norms of all dimensions, dropouts of all kinds, parts called separately, a codebook, losses kept in attributes."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
clips = torch.randn(100, 2, 4, 6, 6)
kinds = (clips.mean((1, 2, 3, 4)) * 40).long() % 3


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv3, self.norm3 = nn.Conv3d(2, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6, momentum=None)
        self.norm1, self.group = nn.BatchNorm1d(6), nn.GroupNorm(2, 6)
        self.drop3, self.drop2, self.alpha = nn.Dropout3d(0.2), nn.Dropout2d(0.2), nn.AlphaDropout(0.1)

    def forward(self, x):
        x = self.drop3(F.relu(self.norm3(self.conv3(x)))).mean(2)
        x = self.drop2(F.silu(self.group(self.norm2(self.conv2(x)))))
        self.activity = x.abs().mean()
        return self.alpha(self.norm1(x.flatten(2)).mean(2))


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(8, 6)

    def forward(self, x):
        nearest = torch.cdist(x, self.codes.weight).argmin(1)
        chosen = self.codes(nearest)
        self.loss = F.mse_loss(chosen, x.detach()) + 0.25 * F.mse_loss(x, chosen.detach())
        return x + (chosen - x).detach(), nearest


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.codebook = Backbone(), Codebook()
        self.head, self.twin = nn.Linear(6, 3), nn.Linear(6, 3)
        self.twin.weight = self.head.weight
        self.register_buffer("steps", torch.tensor(0))


net = Net()
gate = torch.full((6,), 0.5, requires_grad=True)
optimizer = torch.optim.Adam([{"params": net.parameters()}, {"params": [gate], "lr": 0.05}], lr=5e-3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
for epoch in range(2):
    net.train()
    used = torch.zeros(8, dtype=torch.long)
    total = 0
    for x, y in DataLoader(TensorDataset(clips, kinds), batch_size=22, shuffle=True):
        features = net.backbone(x) * torch.sigmoid(gate)
        coded, codes = net.codebook(features)
        scores = net.head(coded) + net.twin(features)
        positives = (y > 0).sum().clamp(min=1)
        focal = F.cross_entropy(scores, y, reduction="none", weight=torch.tensor([0.5, 1.0, 2.0]))
        loss = focal.sum() / positives + net.codebook.loss + 0.1 * net.backbone.activity
        loss = loss + 1e-3 * sum(p.abs().sum() for p in net.head.parameters())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.steps += 1
        used += torch.bincount(codes, minlength=8)
        total += loss.item()
    net.eval()
    with torch.no_grad():
        features = net.backbone(clips)
        ranked = (net.head(features) + net.twin(features)).topk(2).indices
    hits = (ranked == kinds.unsqueeze(1)).any(1).float().mean()
    plateau.step(total)
    print(epoch, f"{total:.4f} {hits:.3f}", used.sum().item(), int(net.steps), optimizer.param_groups[0]["lr"])
torch.save([net.state_dict(), gate.detach()], sys.argv[1])
