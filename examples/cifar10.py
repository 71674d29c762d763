"""Classify small photographs with a small CNN, save it, and load it again on another device.

    python examples/cifar10.py                                        # one device
    duoka run --devices 0,3 examples/cifar10.py                       # GPUs 0 and 3: the same numbers
    python examples/cifar10.py --epochs 0 --test-device cpu           # the saved net again, on the CPU

An ordinary PyTorch script for one device: two convolutions with pooling, 120-84-10, SGD with momentum, batches of 10.
It reads CIFAR-10 from --data.
"""

import argparse

import torch
import torch.nn.functional as F
from image_files import cifar10
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def train(model: Net, loader: DataLoader, epochs: int, device: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for epoch in range(1, epochs + 1):
        loss_sum = 0.0
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
        print(f"epoch {epoch}: loss {loss_sum / len(loader):.4f}")


@torch.no_grad()
def test(model: Net, loader: DataLoader, device: str, classes: list[str]) -> None:
    """Print the accuracy, and that of each class."""
    model.eval()
    correct, count = [0] * len(classes), [0] * len(classes)
    for images, labels in loader:
        guesses = model(images.to(device)).argmax(dim=1).cpu()
        for label, guess in zip(labels.tolist(), guesses.tolist(), strict=True):
            correct[label] += label == guess
            count[label] += 1
    print(f"test accuracy {sum(correct) / sum(count):.4f}")
    for name, right, total in zip(classes, correct, count, strict=True):
        print(f"  {name:10} {right} of {total}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data", metavar="FOLDER", help="where CIFAR-10's files are")
    parser.add_argument("--epochs", type=int, default=2, help="0: test what was saved before")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--limit", type=int, default=0, help="use only the first so many images")
    parser.add_argument("--save", default="cifar_net.pth", metavar="PATH", help="where the trained weights go")
    parser.add_argument("--test-device", help="cpu, cuda, ...: where the saved net is tested; where it was trained")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_set, test_set, classes = cifar10(args.data, args.limit)
    if args.epochs > 0:
        model = Net().to(device)
        train(model, DataLoader(train_set, batch_size=args.batch_size, shuffle=True), args.epochs, device)
        torch.save(model.state_dict(), args.save)

    device = args.test_device or device
    reloaded = Net()
    reloaded.load_state_dict(torch.load(args.save, map_location="cpu"))
    test(reloaded.to(device), DataLoader(test_set, batch_size=100), device, classes)


if __name__ == "__main__":
    main()
