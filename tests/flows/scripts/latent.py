"""A VAE, a teacher and its student, tasks with learned weights; outputs that are named tuples and dataclasses."""

import sys
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
Coded = namedtuple("Coded", ["image", "mean", "spread"])


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 16), nn.Linear(3, 12)
        self.mean, self.spread = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x):
        hidden = F.relu(self.encode(x.flatten(1)))
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        return Coded(torch.sigmoid(self.decode(code)).view_as(x), mean, spread)


@dataclass
class Found:
    kinds: torch.Tensor
    size: torch.Tensor
    hidden: dict


class Tasks(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Dropout(0.1))
        self.kinds, self.size = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, x):
        hidden = self.body(x.flatten(1))
        return Found(self.kinds(hidden), self.size(hidden).squeeze(1), {"hidden": hidden})


x = torch.rand(110, 3, 4)
kinds, sizes = (x.sum((1, 2)) * 2).long() % 4, x.amax((1, 2))
vae, teacher, student = VAE(), Tasks(32), Tasks(8)
weights = nn.Parameter(torch.zeros(2))
optimizer = torch.optim.Adam([*vae.parameters(), *teacher.parameters(), weights], lr=3e-3)
second = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for epoch in range(2):
    totals = torch.zeros(4)
    teacher.train()
    for image, kind, size in DataLoader(TensorDataset(x, kinds, sizes), batch_size=24, shuffle=True):
        coded = vae(image)
        rebuilt = F.binary_cross_entropy(coded.image, image, reduction="sum")
        divergence = -0.5 * torch.sum(1 + coded.spread - coded.mean.pow(2) - coded.spread.exp())
        found = teacher(image)
        tasks = torch.stack([F.cross_entropy(found.kinds, kind), F.mse_loss(found.size, size)])
        weighted = (torch.exp(-weights) * tasks + weights).sum()
        loss = (rebuilt + divergence) / len(image) + weighted
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        with torch.no_grad():
            taught = teacher(image)
        learned = student(image)
        soft = F.kl_div(
            F.log_softmax(learned.kinds / 2, dim=1), F.softmax(taught.kinds / 2, dim=1), reduction="batchmean"
        )
        hard = F.cross_entropy(learned.kinds, kind, label_smoothing=0.1)
        distilled = 4 * soft + hard + F.smooth_l1_loss(learned.size, taught.size)
        second.zero_grad()
        distilled.backward()
        second.step()
        totals += torch.tensor([rebuilt.item(), divergence.item(), weighted.item(), distilled.item()])
    print(epoch, [f"{total:.3f}" for total in totals.tolist()], f"{found.hidden['hidden'].mean().item():.4f}")
with torch.no_grad():
    print(f"{vae.decode(torch.randn(4, 3)).mean().item():.4f}", [f"{weight:.4f}" for weight in weights.tolist()])
torch.save([vae.state_dict(), teacher.state_dict(), student.state_dict(), weights.detach()], sys.argv[1])
