"""One training loop, with the API or without: `loop.py api|plain SAMPLES SHUFFLE WEIGHTS`."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

how, samples, shuffle, weights = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "shuffled", sys.argv[4]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3))
        self.out = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(x))


source = torch.Generator().manual_seed(7)
x, y = torch.randn(samples, 8, generator=source), torch.randint(0, 4, (samples,), generator=source)
data = TensorDataset(x, y)
if how == "api":
    import duoka

    run = duoka.start(seed=0)
    model = run.model(Net())
    train = run.loader(data, batch_size=16, shuffle=shuffle)
    test = run.loader(DataLoader(data, batch_size=30))
else:
    torch.manual_seed(0)
    model = Net()
    train = DataLoader(data, batch_size=16, shuffle=shuffle)
    test = DataLoader(data, batch_size=30)

optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    model.train()
    for inputs, targets in train:
        scores = model(inputs)
        loss = F.cross_entropy(scores, targets, weight=torch.tensor([1.0, 2.0, 0.5, 1.0]))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"{len(inputs)} {loss.item():.5f} {norm.item():.4f} {(scores.argmax(1) == targets).sum().item()}")
    model.eval()
    with torch.no_grad():
        correct = sum((model(inputs).argmax(1) == targets).sum().item() for inputs, targets in test)
    print(f"epoch {epoch}: {correct} of {samples}")
if how == "plain" or run.is_first:
    torch.save(model.state_dict(), weights)
