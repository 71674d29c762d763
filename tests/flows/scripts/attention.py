"""A transformer encoder with dropout in every place, also inside of its fused attention."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randint(0, 30, (100, 12))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.place = nn.Parameter(torch.randn(12, 16) * 0.1)
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(16, 30)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(12)
        return self.out(self.encoder(self.embed(x) + self.place, mask=mask, is_causal=True))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    total = 0
    for x_batch, y_batch in DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=24, shuffle=True):
        loss = F.cross_entropy(model(x_batch).view(-1, 30), y_batch.view(-1), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(epoch, f"{total:.4f}")
torch.save(model.state_dict(), sys.argv[1])
