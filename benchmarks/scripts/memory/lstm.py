"""A language model of characters: a two-layer LSTM with Adam."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Characters(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 128)
        self.lstm = nn.LSTM(128, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 96)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(characters))[0])


model = Characters()
text = torch.randint(0, 96, (256, 51))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for (rows,) in DataLoader(TensorDataset(text), batch_size=48, drop_last=True):
    out = model(rows[:, :-1])
    loss = nn.functional.cross_entropy(out.reshape(-1, 96), rows[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
