"""A two-layer LSTM with dropout between its layers, time first, padded targets."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randint(0, 20, (120, 7))
y = torch.randint(0, 20, (120, 7))
y[:, 5:][torch.rand(120, 2) < 0.5] = -100


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rnn = nn.LSTM(8, 16, 2, dropout=0.3)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(16, 20)

    def forward(self, x):
        hidden, _ = self.rnn(self.embed(x).transpose(0, 1))
        return self.out(self.drop(hidden.reshape(-1, 16))).view(*hidden.shape[:2], 20)


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    total = 0
    for x_batch, y_batch in DataLoader(TensorDataset(x, y), batch_size=25, shuffle=True):
        scores = model(x_batch)
        loss = F.cross_entropy(scores.reshape(-1, 20), y_batch.t().reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(epoch, f"{total:.4f}", tuple(scores.shape))
torch.save(model.state_dict(), sys.argv[1])
