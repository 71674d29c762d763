"""An encoder and decoder of images with skip connections: little in parameters, much in activations."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def pair(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1),
        nn.GroupNorm(4, out),
        nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1),
        nn.SiLU(),
    )


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([pair(1, 16), pair(16, 32), pair(32, 64)])
        self.up = nn.ModuleList([pair(96, 32), pair(48, 16)])
        self.last = nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for part in self.down:
            x = part(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = kept.pop()
        for part in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = part(torch.cat([x, kept.pop()], 1))
        return self.last(x)


model = Unet()
images = torch.rand(96, 1, 48, 48)
optimizer = torch.optim.Adam(model.parameters())
for (x,) in DataLoader(TensorDataset(images), batch_size=24):
    noise = torch.randn_like(x)
    loss = nn.functional.mse_loss(model(x + 0.3 * noise), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
