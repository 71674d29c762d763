"""A GAN: two models, BatchNorm in one, a gradient penalty for the other, spectral norm, noise of the script's own."""

import hashlib

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(0)
real = torch.randn(72, 6)
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
critic = nn.Sequential(spectral_norm(nn.Linear(6, 16)), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
for _ in range(3):
    for batch in torch.utils.data.DataLoader(real, batch_size=20, shuffle=True):
        n = batch.size(0)
        fake = generator(torch.randn(n, 4))
        mixed = torch.rand(n, 1)
        between = (mixed * batch + (1 - mixed) * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        of_critic.zero_grad()
        loss = critic(fake.detach()).mean() - critic(batch).mean() + 10 * penalty
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()
    print(loss.item())

digest = hashlib.sha256()
for model in (generator, critic):
    for value in model.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
print(digest.hexdigest())
