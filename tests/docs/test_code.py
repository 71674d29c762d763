"""The code that the pages show: Python is run, commands are read by the command line's own parser.

Not run: what needs a GPU or a network of machines (docs/devices.md's block picks GPUs). Commands are parsed and not
executed, as they name files and cards that are not here; what they do is tested where they are at home. Of the blocks
that are run, the loop over `view="local"` in docs/api.md has no full batch, so its body, which has a `...`, is not.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from duoka.cli import cli
from tests.docs.test_readme import BLOCK, CHINESE, ENGLISH
from tests.flows.flow import ROOT, Flow

DOCS = ROOT / "docs"
GPUS = {"devices.md"}  # duoka.devices("free:1") needs a free card
PAGES = [ENGLISH, CHINESE, *sorted(DOCS.glob("*.md"))]
BEFORE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import duoka

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)

torch.manual_seed(0)
images = torch.randn(64, 8)
train_set = dataset = TensorDataset(images, torch.randint(4, (64,)))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(train_set, batch_size=16)
torch.save({"state_dict": model.state_dict()}, "somebody's.pth")

def fit(lr):
    run = duoka.start()
    return float(run.all_sum(lr))
"""


PREPARED = {"checkpoints.md": "loader = duoka.start(seed=0).loader(train_set, batch_size=16)\n"}


def python(page: Path) -> str:
    return "\n".join(body for kind, body in BLOCK.findall(page.read_text()) if kind == "python")


def commands(page: Path) -> list[list[str]]:
    """Every line of a block that begins with `duoka`, without its comment."""
    lines = [line for kind, body in BLOCK.findall(page.read_text()) if not kind for line in body.splitlines()]
    words = [shlex.split(re.split(r"  +[#a-z]", line)[0]) for line in lines if line.startswith("duoka ")]
    return [["net.pt" if word == "FILE..." else word for word in line] for line in words]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python(page) and page.name not in GPUS], ids=lambda p: p.name
)
def test_python_blocks_run(flow: Flow, page: Path) -> None:
    shown = python(page).replace('devices="0,3"', 'devices="cpu:2"').replace("devices=2", 'devices="cpu:2"')
    flow.python([flow.write("page.py", BEFORE + PREPARED.get(page.name, "") + shown)]).ok()


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda p: p.name)
def test_commands_are_ones_that_duoka_takes(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "x.npy", "images.npy", "net.pt"):
        Path(name).touch()
    Path("photos").mkdir()
    context = click.Context(cli, info_name="duoka")
    for words in commands(page):
        _, command, rest = cli.resolve_command(context, words[1:])
        while isinstance(command, click.Group):  # duoka weights show
            context_here = click.Context(command, parent=context, info_name=command.name)
            _, command, rest = command.resolve_command(context_here, rest)
        assert command is not None
        command.make_context(command.name, rest, parent=context)  # raises UsageError
