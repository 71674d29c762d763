from __future__ import annotations

import argparse
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import duoka
from duoka.cli import main
from tests.checkpoint.nets import Net, same


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a model in net.safetensors, and another in run.pth with its average."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    duoka.save_weights(Net(), "net.safetensors", metadata={"licence": "MIT"})
    content = {"model": nn.DataParallel(Net()).state_dict(), "ema": Net(5).state_dict(), "epoch": 3}
    torch.save({**content, "args": argparse.Namespace(lr=1)}, "run.pth")
    return tmp_path


def test_show(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "show", "net.safetensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "net.safetensors: safetensors, 9 tensors, 107 numbers, 432 B"
    assert "  fc.weight                       [10, 4]       float32  160 B" in lines
    assert lines[-3:] == ["beside the tensors:", "  format = 'pt'", "  licence = 'MIT'"]
    assert main(["weights", "show", "run.pth", "--key", "ema"]) == 0
    assert "  fc.weight                       [5, 4]        float32   80 B" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["big.pth", "big.safetensors"])
def test_ten_gigabytes_are_shown_without_their_data(
    name: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "big.pth":
        with torch.serialization.skip_data():  # a hole: it takes no space
            torch.save({"state_dict": {"big": torch.empty(2_500_000_000)}}, name)
    else:
        header = b'{"state_dict.big":{"dtype":"F32","shape":[2500000000],"data_offsets":[0,10000000000]}}'
        with open(name, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 10**10)
    assert (files / name).stat().st_size > 10**10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["weights", "show", name]) == 0
    assert capsys.readouterr().out.endswith("  state_dict.big  [2500000000]  float32  10.0 GB\n")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB


def test_show_says_what_is_beside_the_tensors(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "show", "run.pth"]) == 0
    out = capsys.readouterr().out
    assert "read as inert stand-ins: argparse.Namespace" in out
    assert "  epoch = 3" in out
    assert "  model.module.fc.weight" in out


def test_showing_safetensors_needs_no_torch(files: Path) -> None:
    import subprocess
    import sys

    source = "import sys; from duoka.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source, "weights", "show", "net.safetensors"], capture_output=True)
    assert done.stdout.decode().endswith("False\n")


@pytest.mark.parametrize("target", ["out.safetensors", "out.pth", "out.bin", "out/"])
def test_convert_to_every_format(target: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "convert", "run.pth", target]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"wrote 9 tensors to {target.rstrip('/')}, found under 'model'"
    assert "not written, also in the file: ema (--key chooses)" in out
    assert main(["weights", "diff", "run.pth", target]) == 0
    assert capsys.readouterr().out == "9 tensors are equal, 0 differ\n"
    net, other = Net(), Net()
    duoka.load_weights(net, "run.pth")
    duoka.load_weights(other, target)
    assert same(net, other)


def test_convert_to_several_files(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "convert", "run.pth", "out/model.safetensors", "--max-shard-size", "0.3kB"]) == 0
    assert (files / "out" / "model-00001-of-00002.safetensors").is_file()
    for path in ("out/model.safetensors", "out"):
        assert main(["weights", "diff", "run.pth", path]) == 0
    assert main(["weights", "convert", "out", "again.pth"]) == 0
    assert main(["weights", "diff", "run.pth", "again.pth"]) == 0


def test_convert_with_other_names(files: Path) -> None:
    assert main(["weights", "convert", "net.safetensors", "out.pth", "--rename", "^fc=head"]) == 0
    assert "head.weight" in torch.load("out.pth")


def test_diff_says_by_how_much(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = duoka_state("net.safetensors")
    state["fc.bias"] = torch.zeros(10)
    state["fc.bias"][3] = 2.0
    state["features.0.bias"] = torch.full((4,), float("nan"))
    duoka.save_weights(state, "a.safetensors")
    state["fc.bias"] = torch.zeros(10)
    state["extra"] = torch.ones(1)
    state["fc.weight"] = torch.ones(3, 4)
    duoka.save_weights(state, "b.safetensors")
    assert main(["weights", "diff", "a.safetensors", "b.safetensors"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "7 tensors are equal, 1 differ",
        "  fc.bias    by up to 2 (1 of its largest), 1 of 10 numbers",
        "  fc.weight  [10, 4] float32 and [3, 4] float32",
        "only in the second: extra",
    ]


def duoka_state(path: str) -> dict[str, torch.Tensor]:
    net = Net()
    duoka.load_weights(net, path)
    return dict(net.state_dict())


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["show", "nothing.pth"], 1, "there is no file 'nothing.pth'"),
        (["show"], 2, "missing argument"),
        (["convert", "net.safetensors", "out.h5"], 2, "the target must be a name that ends in .safetensors"),
        (["convert", "net.safetensors", "out.pth", "--rename", "x"], 2, "--rename must be OLD=NEW, but is 'x'"),
        (["convert", "net.safetensors", "out.pth", "--max-shard-size", "x"], 2, "max_shard_size must be a number"),
        (["show", "net.safetensors", "--objects", "trust"], 2, "objects must be 'refuse' or 'inert'"),
        (["show", "run.pth", "--key", "x"], 1, "no weights under 'x'"),
        (["shwo"], 2, "no such command"),
    ],
)
def test_what_cannot_be(
    args: list[str], code: int, told: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", *args]) == code
    error = capsys.readouterr().err
    assert error.startswith("duoka: error: ")
    assert told in error.lower() if told.islower() else told in error


def test_a_dcp_directory_is_not_written_over(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "out").mkdir()
    assert main(["weights", "convert", "net.safetensors", "out/"]) == 1
    assert "out exists already" in capsys.readouterr().err
