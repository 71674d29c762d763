from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict_saver import save

import duoka
from duoka.checkpoint.comparing import convert
from duoka.errors import UnsafePickle, WeightsError
from tests.checkpoint.nets import Calls, Net, same


def saved(path: Path, content: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        save(content, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("at", ["", ".metadata", "__0_0.distcp"])
def test_a_dcp_directory(at: str, tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer = torch.optim.Adam(net.parameters())
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    loaded = duoka.load_weights(other, saved(tmp_path / "dcp", content) / at)
    assert same(net, other)
    assert loaded.format == "DCP directory"


def test_a_directory_written_by_the_first_versions_of_python_3_11(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They pickle members of an enum by `getattr`, of which only the arguments are read."""

    def reduced(member: Any, protocol: int) -> Any:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced)
    net, other = Net(), Net()
    path = saved(tmp_path / "dcp", {"model": net.state_dict()})
    assert b"getattr" in (path / ".metadata").read_bytes()
    duoka.load_weights(other, path)
    assert same(net, other)


def test_a_tensor_in_pieces(tmp_path: Path) -> None:
    """A tensor saved by several ranks, each with its own rows."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    whole = torch.arange(12.0).reshape(4, 3)
    path = saved(tmp_path / "dcp", {"up": whole[:2].clone(), "down": whole[2:].clone()})
    assert FileSystemWriter
    metadata = pickle.loads((path / ".metadata").read_bytes())
    up, down = metadata.state_dict_metadata.pop("up"), metadata.state_dict_metadata.pop("down")
    up.size = torch.Size([4, 3])
    up.chunks += [ChunkStorageMetadata(torch.Size([2, 0]), down.chunks[0].sizes)]
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    metadata.state_dict_metadata = {"weight": up}
    metadata.storage_data = {
        MetadataIndex("weight", torch.Size([0, 0]), 0): places["up"],
        MetadataIndex("weight", torch.Size([2, 0]), 1): places["down"],
    }
    metadata.planner_data = {}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    layer = torch.nn.Linear(3, 4, bias=False)
    duoka.load_weights(layer, path)
    assert torch.equal(layer.weight, whole)
    again = {MetadataIndex("weight", torch.Size([1, 0]), 1): places["down"]}  # over the second row, not the last
    right, metadata.storage_data = metadata.storage_data, {**metadata.storage_data, **again}
    del metadata.storage_data[MetadataIndex("weight", torch.Size([2, 0]), 1)]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(WeightsError, match="two of its parts overlap"):
        duoka.load_weights(layer, path)
    up.size = torch.Size([1 << 40, 3])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(WeightsError, match="bytes were found for"):
        convert(path, tmp_path / "x.safetensors")
    up.size, metadata.storage_data = torch.Size([4, 3]), right
    metadata.planner_data = {"weight": ("a",) * 5000}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(WeightsError, match="lies 5000 levels deep"):
        duoka.load_weights(layer, path)
    metadata.planner_data = {}
    del metadata.storage_data[MetadataIndex("weight", torch.Size([2, 0]), 1)]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(WeightsError, match="6 of 12 numbers were found"):
        duoka.load_weights(layer, path)


@pytest.mark.parametrize("protocol", range(6))
def test_metadata_that_would_run_code_are_refused(protocol: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "dcp", Net().state_dict())
    (path / ".metadata").write_bytes(pickle.dumps(Calls(tmp_path / "ran"), protocol))
    with pytest.raises(UnsafePickle, match=r"would call `posix\.system`"):
        duoka.load_weights(Net(), path)
    assert not (tmp_path / "ran").exists()


def test_a_file_beyond_the_directory_is_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "dcp", Net().state_dict())
    text = (path / ".metadata").read_bytes().replace(b"__0_0.distcp", b"../__0_0.dst")
    (path / ".metadata").write_bytes(text)
    with pytest.raises(WeightsError, match="may only name files beside it"):
        duoka.load_weights(Net(), path)


def test_a_truncated_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "dcp", Net().state_dict())
    os.truncate(path / "__0_0.distcp", 2000)
    with pytest.raises(WeightsError, match="is too short"):
        duoka.load_weights(Net(), path)
