from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import duoka
from duoka.errors import WeightsError
from tests.checkpoint.nets import Net, same


def split(tmp_path: Path, net: Net, kind: str) -> Path:
    """Save the model in two files and an index."""
    files: dict[str, dict[str, Any]] = {}
    for number, (name, tensor) in enumerate(net.state_dict().items()):
        files.setdefault(f"part-{number % 2}.{kind}", {})[name] = tensor
    for file, tensors in files.items():
        (save_file if kind == "safetensors" else torch.save)(tensors, tmp_path / file)
    index = tmp_path / ("model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json")
    places = {name: file for file, tensors in files.items() for name in tensors}
    index.write_text(json.dumps({"metadata": {"total_size": 3}, "weight_map": places}))
    return index


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("named", ["the index", "the directory"])
def test_sharded_files(kind: str, named: str, tmp_path: Path) -> None:
    net, other = Net(), Net()
    index = split(tmp_path, net, kind)
    loaded = duoka.load_weights(other, index if named == "the index" else tmp_path)
    assert same(net, other)
    assert "2 files" in loaded.format


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "mine.safetensors"])
def test_a_directory_with_one_file(name: str, tmp_path: Path) -> None:
    net, other = Net(), Net()
    duoka.save_weights(net, tmp_path / name)
    (tmp_path / "optimizer.bin").touch()
    duoka.load_weights(other, tmp_path)
    assert same(net, other)


@pytest.mark.parametrize("place", ["../part-0.bin", "/etc/passwd", "..", "sub/part.bin", "", 3, None])
def test_an_index_names_only_its_neighbours(place: Any, tmp_path: Path) -> None:
    index = split(tmp_path, Net(), "bin")
    index.write_text(json.dumps({"weight_map": {"fc.weight": place}}))
    with pytest.raises(WeightsError, match=r"may only name files beside it|not an index of weights"):
        duoka.load_weights(Net(), index)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 10_000])
def test_a_damaged_index(text: str, tmp_path: Path) -> None:
    index = split(tmp_path, Net(), "bin")
    index.write_text(text)
    with pytest.raises(WeightsError):
        duoka.load_weights(Net(), index)


def test_parts_that_are_missing(tmp_path: Path) -> None:
    index = split(tmp_path, Net(), "safetensors")
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"there is no file '.*part-1\.safetensors'"):
        duoka.load_weights(Net(), index)
    save_file({"x": torch.ones(1)}, tmp_path / "part-1.safetensors")
    with pytest.raises(WeightsError, match=r"is in part-1\.safetensors, but it is not"):
        duoka.load_weights(Net(), index)
