"""A generator and a discriminator, each with Adam."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 784))
critic = nn.Sequential(
    nn.Linear(784, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)
)
first = torch.optim.Adam(generator.parameters(), lr=2e-4)
second = torch.optim.Adam(critic.parameters(), lr=2e-4)
judge = nn.functional.binary_cross_entropy_with_logits
for (real,) in DataLoader(TensorDataset(torch.rand(1024, 784)), batch_size=128):
    fake = generator(torch.randn(len(real), 64))
    loss = judge(critic(real), torch.ones(len(real), 1)) + judge(critic(fake.detach()), torch.zeros(len(real), 1))
    second.zero_grad()
    loss.backward()
    second.step()
    fooled = judge(critic(fake), torch.ones(len(real), 1))
    first.zero_grad()
    fooled.backward()
    first.step()
    print(loss.item(), fooled.item())
