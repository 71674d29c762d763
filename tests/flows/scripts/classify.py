"""Images, BatchNorm, dropout, clipping, a scheduler on a measured loss; 1,500 + 297 samples in batches of 256."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1500], labels[:1500])
valid_set = TensorDataset(images[1500:], labels[1500:])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.fc(self.drop(torch.flatten(x, 1)))


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
criterion = nn.CrossEntropyLoss()
for epoch in range(3):
    model.train()
    total = correct = seen = 0
    for x, y in DataLoader(train_set, batch_size=256, shuffle=True):
        optimizer.zero_grad()
        scores = model(x)
        loss = criterion(scores, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * x.size(0)
        correct += (scores.argmax(1) == y).sum().item()
        seen += len(y)
    model.eval()
    valid = hits = 0
    with torch.no_grad():
        for x, y in DataLoader(valid_set, batch_size=100):
            scores = model(x)
            valid += F.cross_entropy(scores, y, reduction="sum").item()
            hits += scores.argmax(1).eq(y).float().sum().item()
    scheduler.step(valid)
    rate = optimizer.param_groups[0]["lr"]
    print(f"epoch {epoch}: loss {total / seen:.5f} accuracy {correct / seen:.4f} norm {norm:.4f}")
    print(f"  valid {valid / len(valid_set):.5f} {hits / len(valid_set):.4f} lr {rate}")
torch.save(model.state_dict(), sys.argv[1])
