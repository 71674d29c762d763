"""Handwritten digits with duoka's API: the same numbers on one device and on many.

python examples/api.py                           # one device
duoka run --devices cpu:2 examples/api.py        # two workers; also torchrun, srun, mpirun

Killed, and started again on any number of devices, it goes on where it was. Remove out/digits to begin anew.
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
    saved = run.checkpoint("out/digits", model=model, optimizer=optimizer, loader=train, every_steps=3)

    for epoch in saved.epochs(8):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        loss = correct = 0.0
        with torch.no_grad():
            for x, y in test:
                scores = model(x)
                loss += F.cross_entropy(scores, y, reduction="sum").item()
                correct += (scores.argmax(1) == y).sum().item()
        run.log(step=epoch, loss=loss / len(test_set), accuracy=correct / len(test_set))

    if run.is_first:
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
