"""The guides' own scripts print the same numbers and save the same weights on any number of workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.flows.flow import ROOT, Flow
from tests.flows.reference import Reference

SECONDS = re.compile(r"\(\d+\.\d+ s\)")


@dataclass(frozen=True)
class Example:
    """name: of the script. saved: the weights it leaves. says: what standard output has for sure."""

    name: str
    options: tuple[str, ...]
    saved: str
    says: str

    @property
    def script(self) -> Path:
        return ROOT / "examples" / f"{self.name}.py"


SMALL_CRNN = [
    "text.train=24",
    "text.test=12",
    "model.channels=[4, 8, 8]",
    "model.hidden=16",
    "train.epochs=1",
    "train.batch_size=16",
]
EXAMPLES = [
    Example(
        "fashion_mnist",
        options=("--epochs", "2", "--limit", "512", "--save", "net.pt"),
        saved="net.pt",
        says="no FashionMNIST in",
    ),
    Example(
        "cifar10",
        options=("--epochs", "1", "--limit", "105"),
        saved="cifar_net.pth",
        says="no CIFAR-10 in",
    ),
    Example(
        "crnn/train",
        options=(*(f"--set={it}" for it in SMALL_CRNN), "--save", "net.pt"),
        saved="net.pt",
        says="beam: words",
    ),
    Example(
        "dataparallel_2019",
        options=("--epochs", "1", "--limit", "300"),
        saved="model.pkl",
        says="accuracy: ",
    ),
]


SHORT = {"fashion_mnist": 2, "cifar10": 3, "crnn/train": 2, "dataparallel_2019": 3}
RUNS = [
    pytest.param(
        example,
        workers,
        id=f"{example.name}-{workers}",
        marks=[] if SHORT[example.name] == workers else [pytest.mark.long],
    )
    for example in EXAMPLES
    for workers in (1, 2, 3)
]
# On cards python's own numbers of the others are not one device's (DataParallel), or have no simulation (CTC).
RUNS += [
    pytest.param(example, 2, id=f"{example.name}-cards", marks=[pytest.mark.cards, pytest.mark.long])
    for example in EXAMPLES
    if example.name in ("fashion_mnist", "cifar10")
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Flow, Example], Reference]:
    """What plain python gives on one device, once for each script, on CPUs and on cards."""
    done: dict[tuple[str, bool], Reference] = {}

    def of(flow: Flow, example: Example) -> Reference:
        key = example.name, bool(flow.cards)
        if key not in done:
            alone = flow.alone(tmp_path_factory.mktemp(example.script.stem))
            done[key] = Reference(alone, [example.script, *example.options], example.saved)
            assert example.says in done[key].stdout
        return done[key]

    return of


@pytest.mark.parametrize(("example", "workers"), RUNS)
def test_any_number_of_workers_prints_and_saves_the_same(
    flow: Flow, reference: Callable[[Flow, Example], Reference], example: Example, workers: int
) -> None:
    result = flow.run(["run", "--devices", f"cpu:{workers}", example.script, *example.options]).ok()
    printed = partial(SECONDS.sub, "")
    reference(flow, example).assert_same(printed(result.stdout), flow.folder / example.saved, printed)


def test_what_cifar10_saved_is_tested_again_without_training(flow: Flow) -> None:
    script = ROOT / "examples/cifar10.py"
    options = ["--limit", "100", "--test-device", "cpu"]
    first = flow.python([script, "--epochs", "1", *options]).ok().stdout.split("test accuracy")[1]
    again = flow.run(["run", "--devices", "cpu:2", script, "--epochs", "0", *options]).ok().stdout
    assert again.split("test accuracy")[1] == first


@pytest.mark.cpu_and_cards
def test_a_script_with_its_own_ddp_is_one_on_every_launcher(flow: Flow) -> None:
    script = ROOT / "examples/torchrun_ddp.py"
    options = ["--epochs", "2", "--limit", "512", "--save"]
    one = flow.python([script, *options, "one.pt"]).ok()
    same = flow.run(["run", "--devices", "cpu:1", script, *options, "same.pt"]).ok()
    assert same.stdout == one.stdout
    weights = [torch.load(flow.folder / name, map_location="cpu") for name in ("one.pt", "same.pt")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    two = flow.run(["run", "--devices", "cpu:2", script, *options, "two.pt"]).ok()
    assert [line.rpartition(", ")[2] for line in two.stdout.splitlines()] == ["2 ranks"] * 2  # rank 0's lines alone
    half = flow.run(["run", "--devices", "cpu:2", script, "--batch-size", "32", *options, "half.pt"]).ok()
    assert half.stdout != two.stdout  # the script's batch size is that of each process, and is left so


@pytest.mark.cpu_and_cards
def test_a_stopped_run_goes_on_as_one_that_never_stopped(flow: Flow) -> None:
    script = ROOT / "examples/resume.py"
    whole = Reference(flow, [script, "--limit", "512", "--epochs", "4", "--out", "whole"])
    first = flow.python([script, "--limit", "512", "--epochs", "1", "--out", "parts"]).ok().stdout
    second = flow.run(["run", "--devices", "cpu:3", script, "--limit", "512", "--epochs", "3", "--out", "parts"]).ok()
    third = flow.run(["run", "--devices", "cpu:2", script, "--limit", "512", "--epochs", "4", "--out", "parts"]).ok()
    epochs = [line for text in (first, second.stdout, third.stdout) for line in text.splitlines() if "epoch" in line]
    whole.assert_same("\n".join(epochs), part=lambda text: "\n".join(re.findall("(?m)^.*epoch.*$", text)))
    again = flow.python([script, "--limit", "512", "--epochs", "4", "--out", "parts"]).ok().stdout
    assert again == third.stdout.splitlines()[-1] + "\n"  # all was done


def test_inference_keeps_the_order(flow: Flow) -> None:
    script = ROOT / "examples/resnet_inference.py"
    options = ["--limit", "11", "--size", "32", "--batch-size", "4"]  # 4, 4 and 3
    alone = Reference(flow, [script, *options])
    result = flow.run(["run", "--devices", "cpu:3", script, *options]).ok()
    alone.assert_same(result.stdout)
    assert [line.split(":")[0] for line in alone.stdout.splitlines()] == [f"image {i}" for i in range(11)]
