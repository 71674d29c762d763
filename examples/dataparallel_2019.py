"""A script of 2019 as the guides wrote it, with nn.DataParallel and its card numbers in the source.

    python examples/dataparallel_2019.py                              # what it was written for
    duoka run --devices 0,3 examples/dataparallel_2019.py             # a process for each card, the same numbers

duoka's choice of devices wins over the numbers below; nn.DataParallel is passed through, and keeps `.module`.
"""

import argparse
import os

os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.autograd import Variable
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--limit", type=int, default=1437)
parser.add_argument("--save", default="model.pkl")
args = parser.parse_args()

torch.manual_seed(1)
device_ids = [0, 1]
digits = load_digits()
images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
labels = torch.from_numpy(digits.target)
train_loader = DataLoader(TensorDataset(images[: args.limit], labels[: args.limit]), batch_size=64, shuffle=True)
test_loader = DataLoader(TensorDataset(images[1437:], labels[1437:]), batch_size=64, shuffle=False)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.25), nn.Linear(128, 10),
)  # fmt: skip
model = nn.DataParallel(model, device_ids=device_ids, output_device=device_ids[0], dim=0)
criterion = nn.CrossEntropyLoss()
if torch.cuda.is_available():
    model = model.cuda(device_ids[0])
    criterion = criterion.cuda(device_ids[0])
optimizer = optim.SGD(model.module.parameters(), lr=0.05, momentum=0.9)

for epoch in range(args.epochs):
    model.train()
    running_loss = 0.0
    for inputs, targets in train_loader:
        if torch.cuda.is_available():
            inputs, targets = inputs.cuda(device_ids[0]), targets.cuda(device_ids[0])
        inputs, targets = Variable(inputs), Variable(targets)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        running_loss += loss.data.item()
    print("epoch: %d, loss: %.4f" % (epoch + 1, running_loss / len(train_loader)))

model.eval()
correct = total = 0
with torch.no_grad():
    for inputs, targets in test_loader:
        if torch.cuda.is_available():
            inputs, targets = inputs.cuda(device_ids[0]), targets.cuda(device_ids[0])
        _, predicted = torch.max(model(inputs).data, 1)
        total += targets.size(0)
        correct += (predicted == targets).sum().item()
print("accuracy: %.4f" % (correct / total))
torch.save(model.module.state_dict(), args.save)
