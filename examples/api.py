"""Handwritten digits with duoka's API: the same numbers on one device and on many.

python examples/api.py                           # one device
duoka run --devices cpu:2 examples/api.py        # two workers; also torchrun, srun, mpirun
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import duoka


def main() -> None:
    run = duoka.start(seed=0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1
    train_set, test_set = random_split(TensorDataset(images, torch.tensor(digits.target)), [1437, 360])

    net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.25), nn.Linear(256, 10))
    model = run.model(net)
    train = run.loader(train_set, batch_size=256, shuffle=True)
    test = run.loader(test_set, batch_size=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(1, 9):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
        run.log(step=epoch, loss=loss, accuracy=correct / len(test_set))

    if run.is_first:
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
