"""A residual CNN with BatchNorm, SGD with momentum and weight decay."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.norm(self.first(x)))
        return torch.relu(x + self.last(self.second(out)))


def stage(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width // 2, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(), Residual(width))


model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    stage(64),
    stage(128),
    stage(256),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(256, 10),
)
data = TensorDataset(torch.randn(384, 3, 32, 32), torch.randint(0, 10, (384,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
for x, y in DataLoader(data, batch_size=96, shuffle=True):
    out = model(x)
    loss = nn.functional.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item(), (out.argmax(1) == y).sum().item())
