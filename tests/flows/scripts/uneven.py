"""Batches of odd sizes, down to 1; a hidden state and a table of losses that outlive batches: `uneven.py FILE`."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Sizes(Sampler):
    def __iter__(self):
        order, at = torch.randperm(60).tolist(), 0
        for size in (1, 2, 3, 9, 4, 1, 7, 2, 11, 20):
            yield order[at : at + size]
            at += size

    def __len__(self):
        return 10


data = TensorDataset(torch.randn(60, 6), torch.randn(60), torch.arange(60))
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 4))
cell, head = nn.GRUCell(4, 6), nn.Linear(6, 1)
optimizer = torch.optim.Adam([*net.parameters(), *cell.parameters(), *head.parameters()], lr=0.02)
table = torch.zeros(60)
for loader in (
    DataLoader(data, batch_sampler=Sizes()),
    DataLoader(data, 12, sampler=WeightedRandomSampler(torch.rand(60).tolist(), 48), drop_last=True),
    DataLoader(data, 12, shuffle=True),
):
    hidden = None
    for x, y, at in loader:
        if loader.batch_size is None:
            hidden = None
        hidden = cell(net(x), None if hidden is None else hidden.detach())
        each = F.smooth_l1_loss(head(hidden).squeeze(1), y, reduction="none")
        hard = each[each >= each.mean()]
        loss = hard.mean() + 0.1 * each.max() + 0.1 * each.sort().values[: len(each) // 2].sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        table[at] = each.detach()
        print(f"{len(x)} {len(hard)} {loss.item():.8f} {each.median().item():.8f} {hidden.norm().item():.8f}")
print(f"{table.sum():.8f}", table.topk(3).indices.tolist())
torch.save(net.state_dict(), sys.argv[1])
