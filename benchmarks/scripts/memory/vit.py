"""A vision transformer under autocast to bfloat16, with learned tokens."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
WIDTH = 192


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 65, WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


model = Vit()
data = TensorDataset(torch.randn(160, 3, 32, 32), torch.randint(0, 100, (160,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for x, y in DataLoader(data, batch_size=40):
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
