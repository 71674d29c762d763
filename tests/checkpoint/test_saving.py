from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import duoka
from duoka.checkpoint.saving import parse_size, split
from tests.checkpoint.nets import Net, Odd, compiled, same
from tests.checkpoint.runs import die, fail, fault, in_child


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

    def full(fd: int, data: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
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


# Several files.

SIZE = 200  # bytes: of the 432 of `Net`


def files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_the_names_and_the_index_are_hugging_face_s(ending: str, tmp_path: Path) -> None:
    net, other = Net(), Net()
    path = tmp_path / f"model.{ending}"
    duoka.save_weights(net, path, max_shard_size=SIZE)
    assert files(tmp_path) == [
        f"model-00001-of-00003.{ending}",
        f"model-00002-of-00003.{ending}",
        f"model-00003-of-00003.{ending}",
        f"model.{ending}.index.json",
    ]
    index = json.loads((tmp_path / f"model.{ending}.index.json").read_text())
    state = net.state_dict()
    assert index["metadata"]["total_size"] == sum(it.numel() * it.element_size() for it in state.values())
    assert [*index["weight_map"]] == [*state]
    for name, file in index["weight_map"].items():
        found = load_file(tmp_path / file) if ending == "safetensors" else torch.load(tmp_path / file)
        assert torch.equal(found[name], state[name])
    for way in (path, f"{path}.index.json", tmp_path) if ending == "safetensors" else (path, f"{path}.index.json"):
        duoka.load_weights(other, way)
        assert same(net, other)
        torch.nn.init.zeros_(other.fc.weight)


def test_what_is_small_is_one_file(tmp_path: Path) -> None:
    duoka.save_weights(Net(), tmp_path / "model.safetensors", max_shard_size="5GB")
    assert files(tmp_path) == ["model.safetensors"]


def test_odd_tensors_in_parts(tmp_path: Path) -> None:
    odd, other = Odd(), Odd()
    duoka.save_weights(odd, tmp_path / "odd.safetensors", max_shard_size=16)
    duoka.load_weights(other, tmp_path / "odd.safetensors")
    assert same(odd, other)


def test_one_save_takes_the_place_of_another(tmp_path: Path) -> None:
    found = Net()
    (tmp_path / "model-00001-of-00002.safetensors").touch()  # named by nothing: somebody else's
    for most in (SIZE, SIZE, None, SIZE, 100, None):
        net = Net()
        duoka.save_weights(net, tmp_path / "model.safetensors", max_shard_size=most)
        for way in (tmp_path, tmp_path / "model.safetensors"):
            torch.nn.init.zeros_(found.fc.weight)
            duoka.load_weights(found, way)
            assert same(net, found)
    assert files(tmp_path) == ["model-00001-of-00002.safetensors", "model.safetensors"]


def test_an_index_of_somebody_else_costs_none_of_the_files_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "notes.safetensors").touch()
    index = {"weight_map": {"a": "notes.safetensors", "b": "../x", "c": 3}}
    for text in (json.dumps(index), "{", "[]"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        duoka.save_weights(Net(), tmp_path / "model.safetensors", max_shard_size=SIZE)
        assert (tmp_path / "notes.safetensors").exists()
        duoka.load_weights(Net(), tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("act", "before", "now"),
    [
        (die, 400, 400),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((fail, 400, 400), (die, None, 400), (die, 400, None), (fail, None, 400), (die, 200, 400))
        ),
    ],
)
def test_the_old_or_the_new_at_every_call(
    act: Any, before: int | None, now: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, found = Net(), Net(), Net()
    duoka.save_weights(old, tmp_path / "tried" / "model.safetensors", max_shard_size=before)
    with fault(monkeypatch, -1, fail) as calls:
        duoka.save_weights(new, tmp_path / "tried" / "model.safetensors", max_shard_size=now)
    for number in range(len(calls)):
        path = tmp_path / str(number) / "model.safetensors"
        duoka.save_weights(old, path, max_shard_size=before)

        def write(path: Path = path, number: int = number) -> None:
            with fault(monkeypatch, number, act):
                duoka.save_weights(new, path, max_shard_size=now)

        ended = in_child(write)
        assert ended in ([-signal.SIGKILL] if act is die else [0, 1])
        for way in (path, path.parent):
            duoka.load_weights(found, way)
            assert same(found, new) or (same(found, old) and ended != 0)
        assert act is die or not [name for name in os.listdir(path.parent) if name.endswith(".partial")]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 40))
def test_parts(sizes: list[int], most: int) -> None:
    tensors = {str(number): torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    parts = split(tensors, most)
    assert [name for part in parts for name in part] == [*tensors]
    assert all(part for part in parts)
    for part in parts:
        assert sum(it.numel() for it in part.values()) <= most or len([it for it in part.values() if it.numel()]) == 1


@pytest.mark.parametrize(
    ("given", "size"),
    [(1, 1), ("5GB", 5 * 10**9), ("1.5 kB", 1500), ("2GiB", 2 << 30), ("200", 200), ("10mb", 10**7)],
)
def test_sizes(given: Any, size: int) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "", "GB", "5XB", "5 G B", "0GB", None, "1e3"])
def test_what_is_no_size(given: Any) -> None:
    with pytest.raises(duoka.OptionError, match="max_shard_size must be a number of bytes above 0"):
        parse_size(given)
