"""Teach a CRNN to read lines of text that are drawn with real fonts: an ordinary PyTorch script for one device.

python examples/crnn/train.py                                     # one device
duoka run --devices 0,3 examples/crnn/train.py                    # GPUs 0 and 3: the same numbers
python examples/crnn/train.py --set train.epochs=2 --set text.train=1000
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from decoding import accuracy, beam_search, greedy
from model import CRNN
from text_lines import Alphabet, render
from torch.utils.data import DataLoader


def configuration(path: str, changes: list[str]) -> dict[str, Any]:
    """What config.yaml says, with what `path` and `part.key=value` change. A key that is not there is an error."""
    settings = yaml.safe_load(Path(__file__).with_name("config.yaml").read_text())
    if path:
        _change(settings, yaml.safe_load(Path(path).read_text()) or {}, path)
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise SystemExit(f"--set {change}: PART.KEY=VALUE is allowed")
        new: Any = yaml.safe_load(value)
        for key in reversed(name.split(".")):
            new = {key: new}
        _change(settings, new, f"--set {change}")
    return settings


def _change(settings: dict[str, Any], new: dict[str, Any], source: str) -> None:
    for key, value in new.items():
        if key not in settings:
            raise SystemExit(f"{source}: no {key!r}; there are {', '.join(map(str, settings))}")
        if isinstance(settings[key], dict) and isinstance(value, dict):
            _change(settings[key], value, source)
        elif type(settings[key]) is not type(value) and not {type(settings[key]), type(value)} <= {int, float}:
            raise SystemExit(f"{source}: {key} is {value!r}, and should be like {settings[key]!r}")
        else:
            settings[key] = value


def train(
    model: CRNN, loader: DataLoader, optimizer: torch.optim.Optimizer, schedule: Any, clip: float, device: str
) -> float:
    """One epoch; returns the mean loss of a line."""
    model.train()
    loss_sum, count = 0.0, 0
    for images, targets, lengths in loader:
        images, targets, lengths = images.to(device), targets.to(device), lengths.to(device)
        log_probs = model(images)
        columns = torch.full_like(lengths, log_probs.shape[1])
        loss = F.ctc_loss(log_probs.transpose(0, 1), targets, columns, lengths, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        loss_sum += loss.item() * len(images)
        count += len(images)
    return loss_sum / count


@torch.no_grad()
def test(model: CRNN, loader: DataLoader, alphabet: Alphabet, beam: int, device: str) -> dict[str, list[str]]:
    """What stands in each line, and what is read: greedily and, where beam is not 0, by beam search."""
    model.eval()
    texts: dict[str, list[str]] = {"right": [], "greedy": [], "beam": []}
    for images, targets, lengths in loader:
        log_probs = model(images.to(device)).cpu()
        rows = zip(targets.tolist(), lengths.tolist(), strict=True)
        texts["right"] += [alphabet.decode(target[:length]) for target, length in rows]
        texts["greedy"] += map(alphabet.decode, greedy(log_probs))
        texts["beam"] += map(alphabet.decode, beam_search(log_probs, beam)) if beam else ()
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="", metavar="PATH", help="a YAML file that changes values of config.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="PART.KEY=VALUE", help="changes a single one")
    parser.add_argument("--save", metavar="PATH", help="where to save the trained weights")
    args = parser.parse_args()
    settings = configuration(args.config, args.set)

    torch.manual_seed(settings["seed"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, training = settings["text"], settings["train"]
    alphabet = Alphabet(text["characters"])
    train_set = render(text, alphabet, text["train"], seed=settings["seed"])
    test_set = render(text, alphabet, text["test"], seed=settings["seed"] + 1)
    train_loader = DataLoader(train_set, batch_size=training["batch_size"], shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)

    model = CRNN(**settings["model"], height=text["height"], classes=len(alphabet)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training["learning_rate"])
    steps = max(1, training["epochs"] * len(train_loader))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, training["learning_rate"], total_steps=steps + 1)
    for epoch in range(1, training["epochs"] + 1):
        loss = train(model, train_loader, optimizer, schedule, training["clip"], device)
        texts = test(model, test_loader, alphabet, 0, device)
        words, characters = accuracy(texts["greedy"], texts["right"])
        print(f"epoch {epoch}: loss {loss:.4f}, words {words:.3f}, characters {characters:.3f}")

    texts = test(model, test_loader, alphabet, settings["decode"]["beam"], device)
    for way in ("greedy", "beam"):
        words, characters = accuracy(texts[way], texts["right"])
        print(f"{way}: words {words:.3f}, characters {characters:.3f}")
    for right, read in list(zip(texts["right"], texts["beam"], strict=True))[:5]:
        print(f"  {right!r} is read {read!r}")
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
