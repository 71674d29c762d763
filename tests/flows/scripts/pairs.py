"""Losses over pairs of samples, a gradient penalty, adversarial examples, a model that returns its loss."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(130, 10)
data = TensorDataset(x, x + 0.1 * torch.randn(130, 10), (x[:, 0] > 0).long())
left, right = nn.Linear(10, 16), nn.Linear(10, 16)
heat = nn.Parameter(torch.tensor(1.0))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.Tanh())
        self.head = nn.Linear(16, 2)

    def forward(self, x, labels):
        scores = self.head(self.body(x))
        return {"loss": F.cross_entropy(scores, labels), "scores": scores}


critic = Critic()
parameters = [*left.parameters(), *right.parameters(), heat, *critic.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
for epoch in range(2):
    total = hits = moved = 0
    for a, b, labels in DataLoader(data, batch_size=37, shuffle=True):
        p, q = F.normalize(left(a), dim=-1), F.normalize(right(b), dim=-1)
        likeness = p @ q.t() * heat.exp()
        same = torch.arange(len(a))
        contrast = (F.cross_entropy(likeness, same) + F.cross_entropy(likeness.t(), same)) / 2

        between = (torch.rand(len(a), 1) * a + 0.5 * b).requires_grad_()
        out = critic.head(critic.body(between)).sum(1)
        (slope,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()

        probe = a.clone().requires_grad_()
        critic(probe, labels)["loss"].backward()
        attacked = (probe + 0.1 * probe.grad.sign()).detach()
        moved += probe.grad.abs().sum().item()

        result = critic(attacked, labels)
        loss = contrast + 0.1 * penalty + result["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        hits += (result["scores"].argmax(-1) == labels).sum().item()
    print(epoch, f"{total:.4f}", hits, f"{moved:.4f}")
torch.save([left.state_dict(), right.state_dict(), heat.detach(), critic.state_dict()], sys.argv[1])
