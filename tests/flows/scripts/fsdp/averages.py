"""A transformer moved before it is initialised; averages of weights, a penalty, clipping, writing into weights."""

import copy
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.words, self.places = nn.Embedding(11, width), nn.Parameter(torch.zeros(1, 6, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head, self.scale = nn.Linear(width, 11, bias=False), nn.Parameter(torch.ones(()))
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places[:, : ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


model = Net()
held = list(model.parameters())
early = copy.deepcopy(model)
optimizer = torch.optim.SGD(held, lr=0.05, momentum=0.9)
model.to(model.scale.device)
for parameter in model.parameters():
    if parameter.dim() > 1:
        nn.init.normal_(parameter, std=0.1)
nn.init.orthogonal_(model.blocks[0].mlp[0].weight)
average = copy.deepcopy(model)
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
initial = [parameter.detach().clone() for parameter in model.parameters()]
text = torch.randint(0, 11, (40, 7))
for step in range(6):
    loss = loss_of(model, text[torch.randperm(40)[:10]])
    penalty = sum((now - before).pow(2).sum() for now, before in zip(model.parameters(), initial, strict=True))
    optimizer.zero_grad()
    (loss + 0.01 * penalty).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    largest = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), held, strict=True):
            mean.mul_(0.9).add_(parameter, alpha=0.1)
            parameter.data.mul_(0.999)
        for mean, parameter in zip(early.parameters(), held, strict=True):
            mean.data = mean.data * 0.9 + parameter.data * 0.1
        model.words.weight[0].zero_()
        model.blocks[1].norm.weight.view(-1)[:2].fill_(1.5)
    averaged.update_parameters(model)
    total = sum(parameter.norm() ** 2 for parameter in model.parameters()).sqrt()
    print(step, f"{loss.item():.5f} {penalty.item():.5f} {norm:.5f} {largest:.5f} {total.item():.5f}")
with torch.no_grad():
    for net in (model, average, averaged, early):
        print(f"{loss_of(net.eval(), text).item():.5f}")
weight = model.words.weight
print(weight is model.head.weight, weight is held[1], type(weight) is type(average.words.weight), weight.shape)
print(f"{weight[1, 1].item():.4f} {weight.numpy(force=True).sum():.4f}", weight.is_leaf, weight.grad_fn, len(weight))
torch.save([net.state_dict() for net in (model, average, averaged)] + [optimizer.state_dict()["state"]], sys.argv[1])
