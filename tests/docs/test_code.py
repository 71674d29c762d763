"""The code that the pages show is run, and their commands are ones that work.

    python blocks           run, those of a page one after the other
    duoka ...               read by the command line's own parser: they name cards and files that are not here, and
                            what they do is tested where it is at home
    python, torchrun ...    run, with an example's small settings; files of weights that are not here are left out
    make ...                there is such a target
    pip install ...         of this package, with extras that there are
    .venv/bin/...           there is such a program, and the files that it is given

Not run: what needs a GPU (the Python block of docs/devices.md picks free ones) or a cluster (`bash` blocks: of these
only the lines that call duoka are read, as above), and code of other libraries in docs/coming-from.md (`py` blocks).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from duoka.cli import cli
from tests.docs.pages import CHINESE, DOCS, ENGLISH, EXAMPLES, PAGES, blocks, commands, name
from tests.flows.flow import ROOT, Flow, surroundings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest needs there

NEEDS_GPUS = {DOCS / "devices.md"}  # duoka.devices("free:1") needs a free card
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
train_set = test_set = dataset = TensorDataset(images, torch.randint(4, (64,)))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(train_set, batch_size=16)
torch.save({"state_dict": model.state_dict()}, "somebody's.pth")

def fit(lr):
    run = duoka.start()
    return float(run.all_sum(lr))
"""
PREPARED = {DOCS / "checkpoints.md": "loader = duoka.start(seed=0).loader(train_set, batch_size=16)\n"}
BETWEEN = {DOCS / "coming-from.md": "\nrun.close()\n"}  # each block there is a script of its own
WITH_CODE = [page for page in PAGES if any(block.kind == "python" for block in blocks(page))]
SMALL = {  # what an example gets beside the words that are shown
    "api.py": [],
    "cifar10.py": ["--limit", "20"],
    "dataparallel_2019.py": ["--limit", "64", "--epochs", "1"],
    "digits.py": ["--epochs", "1"],
    "fashion_mnist.py": ["--limit", "64", "--epochs", "1"],
    "resnet_inference.py": ["--limit", "2", "--size", "32"],
    "resume.py": ["--limit", "64", "--epochs", "1"],
    "torchrun_ddp.py": ["--limit", "64", "--epochs", "1"],
    "train.py": [
        f"--set={it}" for it in ("text.train=8", "text.test=4", "train.epochs=1", "model.channels=[4, 4, 4]")
    ],
}


@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in NEEDS_GPUS], ids=name)
def test_python_blocks_run(flow: Flow, page: Path) -> None:
    shown = BETWEEN.get(page, "\n").join(block.body for block in blocks(page) if block.kind == "python")
    shown = shown.replace('devices="0,3"', 'devices="cpu:2"').replace("devices=2", 'devices="cpu:2"')
    flow.python([flow.write("page.py", BEFORE + PREPARED.get(page, "") + shown)]).ok()


SHOWN = [(path, words) for path in [*PAGES, *EXAMPLES] for words in commands(path)]


@pytest.mark.parametrize("path", dict.fromkeys(path for path, words in SHOWN if words[0] == "duoka"), ids=name)
def test_commands_are_ones_that_duoka_takes(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for file in ("train.py", "x.npy", "images.npy", "net.pt"):
        Path(file).touch()
    Path("photos").mkdir()
    for words in (words for shown_in, words in SHOWN if shown_in == path and words[0] == "duoka"):
        _parse(["net.pt" if word == "FILE..." else word for word in words])


def _parse(words: list[str]) -> None:
    """Raises UsageError where duoka would."""
    context = click.Context(cli, info_name="duoka")
    _, command, rest = cli.resolve_command(context, words[1:])
    while isinstance(command, click.Group):  # duoka weights show
        context_here = click.Context(command, parent=context, info_name=command.name)
        _, command, rest = command.resolve_command(context_here, rest)
    assert command is not None
    command.make_context(command.name, rest, parent=context)


def test_duoka_in_shell_scripts_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    shell = [block.body for page in PAGES for block in blocks(page) if block.kind == "bash"]
    found = re.findall(r"duoka run [^;|\n]*", "\n".join(shell))
    assert found
    for command in found:
        _parse(shlex.split(command))


PYTHON = {" ".join(words): words for _, words in SHOWN if words[0] == "python" and words[1] != "-m"}


@pytest.mark.long  # tests/examples runs the same scripts
@pytest.mark.parametrize("words", PYTHON.values(), ids=PYTHON)
def test_python_lines_run(flow: Flow, words: list[str]) -> None:
    script, given = ROOT / words[1], words[2:]
    small = SMALL[script.name]
    if "--epochs" in given:  # what was saved before is tested
        flow.python([script, *small, "--epochs", "1"]).ok()
        small = [*small, *given]
    flow.python([script, *small]).ok()


LAUNCHED = [words for _, words in SHOWN if words[0] == "torchrun" or "torch.distributed.launch" in words]


@pytest.mark.long
@pytest.mark.parametrize("words", LAUNCHED, ids=" ".join)
def test_torchrun_lines_run(tmp_path: Path, words: list[str]) -> None:
    script = ROOT / words[-1]
    command = [Path(sys.executable).with_name(words[0]), *words[1:-1], script, *SMALL[script.name]]
    done = subprocess.run(
        command, cwd=tmp_path, env=surroundings({"OMP_NUM_THREADS": "1"}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout


def test_make_has_the_targets_that_are_shown() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    shown = {words[1] for _, words in SHOWN if words[0] == "make"}
    inline = set(re.findall(r"`make ([\w-]+)", "".join(page.read_text() for page in PAGES)))
    assert shown | inline <= targets
    helped = set(re.findall(r'@echo "make ([\w-]+)', makefile))
    assert helped == targets - {"help"}


def test_pip_installs_what_there_is() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for _, words in SHOWN:
        if words[0] == "pip":
            assert words[:3] == ["pip", "install", "-e"], words
            package, _, asked = words[3].rstrip("]").partition("[")
            assert package == "."
            assert set(filter(None, asked.split(","))) <= set(extras), words


def test_programs_of_the_environment_are_there() -> None:
    for _, words in SHOWN:
        if words[0].startswith(".venv/bin/"):
            assert Path(sys.executable).with_name(Path(words[0]).name).exists(), words
            for word in words[1:]:
                assert "/" not in word or (ROOT / word).exists(), words


def test_what_is_read_here_is_not_nothing() -> None:
    for program in ("duoka", "make", "pip", "python", "torchrun", ".venv/bin/pytest"):
        assert any(words[0] == program for _, words in SHOWN), program
    for page in (ENGLISH, CHINESE, DOCS / "index.md"):
        assert any(path == page for path, _ in SHOWN), page
