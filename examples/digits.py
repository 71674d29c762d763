"""Teach a small network to read handwritten digits: an ordinary PyTorch script for one device.

The data are scikit-learn's: 1797 images of 8x8 pixels, of which 360 are kept for validation.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    """Two hidden layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.25),
            nn.Linear(256, 64), nn.ReLU(), nn.Dropout(0.25),
            nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images.flatten(1))


def train(model: Net, loader: DataLoader, optimizer: torch.optim.Optimizer, device: str) -> tuple[float, float]:
    """One epoch; returns mean loss and accuracy."""
    model.train()
    loss_sum, correct, count = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(labels)
        correct += (logits.argmax(dim=1) == labels).sum().item()
        count += len(labels)
    return loss_sum / count, correct / count


@torch.no_grad()
def validate(model: Net, loader: DataLoader, device: str) -> float:
    """Accuracy on images that were not trained on."""
    model.eval()
    correct, count = 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum().item()
        count += len(labels)
    return correct / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="PATH", help="where to save the trained weights")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1  # pixels are 0 to 16
    labels = torch.tensor(digits.target)
    train_set, test_set = random_split(TensorDataset(images, labels), [1437, 360])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(1, args.epochs + 1):
        loss, accuracy = train(model, train_loader, optimizer, device)
        validation = validate(model, test_loader, device)
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}, validation {validation:.4f}")
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
