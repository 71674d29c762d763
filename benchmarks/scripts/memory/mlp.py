"""A wide MLP with SGD and momentum."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(2048, 256), torch.randint(0, 10, (2048,)))
model = nn.Sequential(
    nn.Linear(256, 1500), nn.ReLU(), nn.Linear(1500, 1000), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1000, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for x, y in DataLoader(data, batch_size=500, shuffle=True):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
