"""Classify clothes with a fully connected net: 784-512-512-10, SGD, batches of 1024, as in many a first tutorial.

    python examples/fashion_mnist.py                             # one device
    duoka run --devices 0,3 examples/fashion_mnist.py            # GPUs 0 and 3: the same numbers

An ordinary PyTorch script for one device. It reads FashionMNIST's four files from --data.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from image_files import fashion_mnist
from torch import nn
from torch.utils.data import DataLoader


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: str) -> float:
    """One epoch; returns the mean loss."""
    model.train()
    loss_sum, count = 0.0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(labels)
        count += len(labels)
    return loss_sum / count


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader, device: str) -> float:
    """Accuracy."""
    model.eval()
    correct, count = 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
        count += len(labels)
    return correct / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data", metavar="FOLDER", help="where FashionMNIST's files are")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--limit", type=int, default=0, help="use only the first so many images")
    parser.add_argument("--save", metavar="PATH", help="where to save the trained weights")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set, test_set = fashion_mnist(args.data, args.limit)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)

    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512), nn.ReLU(),
        nn.Linear(512, 512), nn.ReLU(),
        nn.Linear(512, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        start = time.time()
        loss = train(model, train_loader, optimizer, device)
        accuracy = test(model, test_loader, device)
        print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.4f} ({time.time() - start:.2f} s)")
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
