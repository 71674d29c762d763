"""A GAN: two models, two optimizers, noise drawn by the size of the batch, D(G(z))."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(200, 6) + 2)
maker = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6))
judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3)
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(2):
    losses = [0.0, 0.0]
    for (real,) in DataLoader(data, batch_size=32, shuffle=True):
        n = real.size(0)
        ones, zeros = torch.ones(n, 1), torch.zeros(n, 1)
        made = maker(torch.randn(n, 3))
        judge_optimizer.zero_grad()
        judged = criterion(judge(real), ones) + criterion(judge(made.detach()), zeros)
        judged.backward()
        judge_optimizer.step()
        maker_optimizer.zero_grad()
        fooled = criterion(judge(made), ones)
        fooled.backward()
        maker_optimizer.step()
        losses[0] += judged.item()
        losses[1] += fooled.item()
    print(epoch, *(f"{loss:.4f}" for loss in losses))
torch.save([maker.state_dict(), judge.state_dict()], sys.argv[1])
