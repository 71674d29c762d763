"""Stop this at any moment and start it again: it goes on, on any number of devices.

    python examples/resume.py                                    # Ctrl-C, kill, power cut ...
    duoka run --devices cpu:2 examples/resume.py                 # ... and on, with two workers

An ordinary script for one device, with one thing of duoka's: a checkpoint after every epoch. It keeps the model, the
optimizer, the schedule, the best accuracy and the random streams, so the numbers are those of a run that was never
stopped. At SIGTERM it saves at once and ends with exit code 75; torch's DataLoader does not know where it is, so the
epoch that was begun is then begun again (api.py's loader goes on at the very batch).
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import duoka


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--limit", type=int, default=1437, help="train on the first so many images only")
    parser.add_argument("--out", default="out/resume", metavar="FOLDER", help="where the checkpoints are")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 8 - 1
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[: args.limit], labels[: args.limit]), batch_size=128, shuffle=True)
    test_images, test_labels = images[1437:].to(device), labels[1437:].to(device)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.25), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    saved = duoka.Checkpoint(
        args.out, {"model": model, "optimizer": optimizer, "schedule": schedule, "best": 0.0}, best="max"
    )
    for epoch in saved.epochs(args.epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            saved.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
        saved.metric = accuracy
        saved.values["best"] = max(saved.values["best"], accuracy)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy:.4f}, best {saved.values['best']:.4f}")
    print(f"the best is in {saved.best()}")


if __name__ == "__main__":
    main()
