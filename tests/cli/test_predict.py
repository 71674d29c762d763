from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import duoka
from duoka.cli import main
from tests.flows.flow import Flow

NETS = """
import os, sys, time, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        if os.path.exists("slow"):
            time.sleep(0.3)
        if os.path.exists("broken") and (x == 6).any():
            raise ValueError("no sixes")
        return x * self.weight

def make():
    return Net()

def size(path):
    return torch.tensor(float(path.stat().st_size))
"""


@pytest.fixture
def folder(flow: Flow) -> Path:
    flow.write("nets.py", NETS)
    numpy.save(flow.folder / "data.npy", numpy.arange(20, dtype=numpy.float32))
    return flow.folder


@pytest.mark.usefixtures("folder")
def test_an_array_to_an_array(flow: Flow) -> None:
    words = "predict nets:make --data data.npy --out out.npy --devices cpu:2 --wait --batch-size 3"
    result = flow.run(words.split()).ok()
    assert numpy.load(flow.folder / "out.npy").tolist() == [2.0 * item for item in range(20)]
    assert not (flow.folder / "out.npy.part").exists()
    assert result.stdout == ""
    assert "already" not in result.stderr
    assert "must be a new file" in flow.run(words.split()).stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["net.safetensors", "out"])
def test_weights_of_any_format(flow: Flow, name: str) -> None:
    net = nn.Module()
    net.weight = nn.Parameter(torch.tensor(3.0))
    if name == "out":  # a checkpoint
        with duoka.Checkpoint(flow.folder / name, {"model": net}) as saved:
            saved.save()
    else:
        duoka.save_weights(net, flow.folder / name)
    words = f"predict nets:make --weights {name} --data data.npy --out out.npy"
    assert "loaded 1 tensors" in flow.run(words.split()).ok().stderr
    assert numpy.load(flow.folder / "out.npy").tolist() == [3.0 * item for item in range(20)]


@pytest.mark.usefixtures("folder")
def test_a_folder_to_lines(flow: Flow) -> None:
    for name in "abc":
        flow.write(f"files/{name}.txt", name * ord(name))
    flow.run(["predict", "nets:make", "--data", "files", "--read", "nets:size", "--out", "out.jsonl"]).ok()
    lines = [json.loads(line) for line in (flow.folder / "out.jsonl").read_text().splitlines()]
    assert lines == [{"index": place, "output": 2.0 * ord(name)} for place, name in enumerate("abc")]


DEEP = """
import torch
from torch import nn

def make():
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)])
    print(sum(p.numel() for p in net.parameters()), "parameters")
    return net

class Broken(nn.Linear):
    def forward(self, x):
        if (x == 6).any():
            raise ValueError("no sixes")
        return super().forward(x)

def broken():
    return Broken(8, 8)

def empty():
    with torch.device("meta"):
        return make()
"""


def deep(folder: Path) -> nn.Sequential:
    """A model of `deep:make` with weights in deep.safetensors, and its data in data.npy."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)])
    net(torch.randn(50, 8))  # changes the statistics
    duoka.save_weights(net, folder / "deep.safetensors")
    numpy.save(folder / "data.npy", torch.randn(23, 8).numpy())
    return net.eval()


@pytest.mark.parametrize("made", ["make", "empty"])
def test_a_model_in_parts_gives_the_outputs_of_a_whole_one(flow: Flow, made: str) -> None:
    flow.write("deep.py", DEEP)
    net = deep(flow.folder)
    words = f"predict deep:{made} --weights deep.safetensors --data data.npy --out out.npy --batch-size 4"
    parts = ["--devices", "cpu:3", "--strategy", "fsdp"]
    result = flow.run([*words.split(), *parts]).ok()
    with torch.no_grad():
        expected = net(torch.from_numpy(numpy.load(flow.folder / "data.npy")))
    assert numpy.load(flow.folder / "out.npy") == pytest.approx(expected.numpy(), abs=1e-6)
    assert "strategy fsdp: each rank holds 1/3 of 264 parameters of Sequential" in result.stderr
    assert result.stdout == "264 parameters\n"
    assert result.stderr.count("loaded 21 tensors") == 1
    if made == "empty":
        words = "predict deep:empty --data data.npy --out 2.npy"
        result = flow.run([*words.split(), *parts])
        assert "error: --weights must be given for a model on the meta device" in result.stderr


def test_a_model_in_parts_that_fails_is_gone_on_with(flow: Flow) -> None:
    flow.write("deep.py", DEEP)
    deep(flow.folder)
    numpy.save(flow.folder / "data.npy", numpy.arange(20, dtype=numpy.float32)[:, None].repeat(8, 1))
    words = [
        "predict",
        "deep:broken",
        "--data",
        "data.npy",
        "--out",
        "out.jsonl",
        "--batch-size",
        "2",
        "--devices",
        "cpu:2",
        "--strategy",
        "fsdp",
    ]
    for args in (words, [*words, "--resume"]):
        result = flow.run(args)
        assert result.returncode == 1
        assert "duoka: error: items 6 to 7 on cpu: ValueError: no sixes" in result.stderr
        assert "6 of 20 outputs are in out.jsonl.part; --resume goes on" in result.stderr
    assert json.loads((flow.folder / "out.jsonl.part").read_text().splitlines()[5])["index"] == 5


def test_another_strategy(flow: Flow) -> None:
    result = flow.run(["predict", "nets:make", "--data", "data.npy", "--out", "out.npy", "--strategy", "ddp"])
    assert result.returncode == 2
    assert "--strategy must be fsdp, or left out, but is 'ddp'" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("ending", ["npy", "jsonl"])
@pytest.mark.usefixtures("folder")
def test_what_is_interrupted_is_gone_on_with(flow: Flow, number: signal.Signals, ending: str) -> None:
    words = f"predict nets:make --data data.npy --out out.{ending} --batch-size 2".split()
    slow = flow.write("slow", "")
    running = flow.start(words)
    note = flow.folder / f"out.{ending}.part.json"
    while not note.exists():
        time.sleep(0.01)
    running.send(number)
    result = running.wait()
    assert result.returncode == 128 + number
    done = json.loads(note.read_text())["done"]
    assert 0 < done < 20
    slow.unlink()
    assert f"{done} of 20 are in" in flow.run(words).stderr
    flow.run([*words, "--resume"]).ok()
    path = flow.folder / f"out.{ending}"
    lines = path.read_text().splitlines() if ending == "jsonl" else []
    rows = [json.loads(line)["output"] for line in lines] if lines else numpy.load(path).tolist()
    assert rows == [2.0 * item for item in range(20)]
    assert not note.exists()


@pytest.mark.usefixtures("folder")
def test_a_batch_that_fails_is_named_by_its_place_in_the_data(flow: Flow) -> None:
    words = ["predict", "nets:make", "--data", "data.npy", "--out", "out.jsonl", "--batch-size", "2"]
    flow.write("broken", "")
    for args in (words, [*words, "--resume"]):
        result = flow.run(args)
        assert result.returncode == 1
        assert "duoka: error: items 6 to 7 on cpu: ValueError: no sixes" in result.stderr
        assert 'raise ValueError("no sixes")' in result.stderr
        assert "6 of 20 outputs are in out.jsonl.part; --resume goes on" in result.stderr
    (flow.folder / "out.jsonl.part.json").unlink()
    result = flow.run([*words[:-1], "8"])
    assert "items 0 to 7 on cpu" in result.stderr
    assert "--resume" not in result.stderr  # there is nothing to go on with


@pytest.mark.usefixtures("folder")
def test_other_data_under_the_same_name_is_not_gone_on_with(flow: Flow) -> None:
    words = ["predict", "nets:make", "--data", "data.npy", "--out", "out.jsonl", "--batch-size", "2"]
    flow.write("broken", "")
    flow.run(words)
    numpy.save(flow.folder / "data.npy", numpy.arange(20, 40, dtype=numpy.float32))
    result = flow.run([*words, "--resume"])
    assert result.returncode == 2
    assert "--resume must be made of the same data, but is 'out.jsonl.part'" in result.stderr


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "missing argument 'MODEL'"),
        ("nets:make", "missing option '--data'"),
        ("nets:make --data data.npy --out out.npy --batch-size 0", "--batch-size must be a whole number from 1"),
        ("nets:make --data none.npy --out out.npy", "--data must be a .npy file, or a folder"),
        ("nets:make --data data.npy --out out.txt", "--out must be a name that ends in .jsonl or .npy"),
        ("nets:mak --data data.npy --out out.npy", "MODEL must be the name of something in it; nets has no mak"),
        ("nets:make --data data.npy --out out.npy --weights x.pt", "--weights must be an existing file"),
        ("nets:make --data data.npy --out out.npy --devices cuda:99", "--devices cuda:99"),
        ("nets:make --data data.npy --out out.npy --wait=soon", "wait must be more than 0 seconds"),
        ("nets:make --data data.npy --out out.npy --precision half", "precision must be one of fp32, bf16, fp16"),
        ("nets:make --data data.npy --out none/out.npy", "--out must be a file in an existing folder"),
        ("nets:make --data data.npy --out data.npy", "--out must be a new file"),
        ("nets:size --data data.npy --out out.npy", "MODEL must be a torch.nn.Module, or a function without arg"),
        (
            "nest:make --data data.npy --out out.npy",
            "MODEL must be in a module that can be imported; there is no nest",
        ),
        ("nets:make --data . --out out.npy", "--data must be a .npy file, or a folder of .npy, .pt or image files"),
        ("nets:make --data data.npy --out out.npy --read nets:nothing", "--read must be the name of something in it"),
    ],
)
def test_what_cannot_be(
    folder: Path, typed: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert main(["predict", *typed.split()]) == 2
    assert f"duoka: error: {said}" in capsys.readouterr().err
    assert not (folder / "out.npy.part.json").exists()
