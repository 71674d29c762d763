from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import duoka
from tests.checkpoint.nets import Net, Odd, compiled


@pytest.mark.parametrize(
    "wrap", [lambda net: net, nn.DataParallel, compiled, lambda net: nn.DataParallel(compiled(net))]
)
@pytest.mark.parametrize("name", ["net.safetensors", "net.pth"])
def test_names_are_the_models_own(wrap: Callable[[nn.Module], nn.Module], name: str, tmp_path: Path) -> None:
    net = Net()
    path = tmp_path / name
    for what in (wrap(net), wrap(net).state_dict()):
        duoka.save_weights(what, path)
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
        assert set(state) == set(net.state_dict())
        assert all(torch.equal(state[key], it) for key, it in net.state_dict().items())


def test_a_module_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)
            self.own = nn.Linear(1, 1)

    duoka.save_weights(Outer(), tmp_path / "outer.safetensors")
    assert set(load_file(tmp_path / "outer.safetensors")) == {
        "module.weight",
        "module.bias",
        "own.weight",
        "own.bias",
    }


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    odd = Odd()
    path = tmp_path / "odd.safetensors"
    duoka.save_weights(odd, path, metadata={"licence": "MIT"})
    with safe_open(path, "pt") as file:
        assert file.metadata()["licence"] == "MIT"
        for name, tensor in odd.state_dict().items():
            stored = file.get_tensor(name)
            expected = torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor
            assert stored.dtype == expected.dtype
            assert torch.equal(stored, expected)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    duoka.save_weights(Net(), path)
    before = path.read_bytes()

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(duoka.WeightsError, match=r"the old file is unchanged.*No space left"):
        duoka.save_weights(Net(), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["net.safetensors"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "there" / "net.safetensors")
    duoka.save_weights(Net(), tmp_path / "link.safetensors")
    assert (tmp_path / "link.safetensors").is_symlink()
    assert (tmp_path / "there" / "net.safetensors").is_file()


@pytest.mark.parametrize("name", ["net.h5", "net", "net.npz"])
def test_an_ending_that_says_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(duoka.OptionError, match=r"path must be a name that ends in \.safetensors"):
        duoka.save_weights(Net(), tmp_path / name)


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    sparse = {"weight": torch.eye(3).to_sparse()}
    with pytest.raises(duoka.WeightsError, match="'weight' is sparse_coo float32"):
        duoka.save_weights(sparse, tmp_path / "sparse.safetensors")
    with pytest.raises(duoka.WeightsError, match="'note' is not a tensor but str"):
        duoka.save_weights({"note": "x"}, tmp_path / "note.safetensors")  # type: ignore[dict-item]
    with pytest.raises(duoka.WeightsError, match="on the meta device"):
        duoka.save_weights(nn.Linear(1, 1, device="meta"), tmp_path / "meta.safetensors")
    assert not list(tmp_path.iterdir())
