"""What scripts do beside training: a frozen part thawed later, hooks, an average of weights, files, best model."""

import copy
import json
import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
out = sys.argv[1]
folder = tempfile.mkdtemp()
os.makedirs(os.path.join(folder, "logs"))  # not exist_ok: only one rank may make it
x = torch.randn(130, 8)
data = TensorDataset(x, x[:, :3].argmax(1))
model = nn.DataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)))
for parameter in model.module[0].parameters():
    parameter.requires_grad_(False)
average = copy.deepcopy(model)
activity = []
model.module[2].register_forward_hook(lambda module, args, result: activity.append(result.mean().item()))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
best = 0
for epoch in range(3):
    if epoch == 1:
        model.module[0].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [model.module[0].weight], "lr": 0.05})
    model.train()
    scores, targets = [], []
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        result = model(x)
        loss = F.cross_entropy(result, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scores.append(result.detach())
        targets.append(y)
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(now, alpha=0.1)
    scores, targets = torch.cat(scores), torch.cat(targets)
    accuracy = (scores.argmax(1) == targets).float().mean()
    confusion = torch.zeros(3, 3, dtype=torch.long)
    for target, guess in zip(targets, scores.argmax(1), strict=True):
        confusion[target, guess] += 1
    if accuracy > best:
        best = accuracy
        torch.save({"model": model.state_dict(), "epoch": epoch}, os.path.join(folder, "best.pt"))
    with open(os.path.join(folder, "logs", "log.json"), "w") as file:
        json.dump({"epoch": epoch, "loss": round(loss.item(), 4)}, file)
    with open(os.path.join(folder, "logs", "log.json")) as file:
        print(json.load(file), os.listdir(folder), os.path.exists(os.path.join(folder, "none")))
    print(f"{accuracy:.4f}", confusion.tolist(), f"{sum(activity):.3f}", scores.cpu().numpy().shape, x[0, :2])
checkpoint = torch.load(os.path.join(folder, "best.pt"))
model.load_state_dict(checkpoint["model"])
print(checkpoint["epoch"])
torch.save([model.state_dict(), average.state_dict()], out)
