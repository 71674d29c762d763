"""Files of torch.save that all ranks write together are those of one device."""

from __future__ import annotations

import os
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import duoka
from duoka.checkpoint import pickled, sharded
from duoka.checkpoint.pickled import combine_sums, write_together
from duoka.checkpoint.ranks import on_first
from duoka.view.tensor.batch import BatchTensor
from tests.run.ranks import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(shape) for shape in ((7, 5), (2, 9), (1, 2, 11), (4, 3, 2)))
        self.all.append(torch.randn(4, 3, 2).permute(2, 0, 1))
        self.all.append(torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last))
        self.head, self.tied = nn.Linear(5, 7, bias=False), nn.Embedding(7, 5)
        self.head.weight = self.tied.weight = self.all[0]
        self.all[1].requires_grad = False
        self.register_buffer("mean", torch.randn(3))


def contents(model: nn.Module) -> Any:
    return {
        "net": model,
        "state": model.state_dict(),
        "n": [1, "two"],
        "rows": torch.arange(6)[1:],
        "none": torch.ones(0),
    }


def records(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {
            info.filename: archive.read(info)
            for info in archive.infolist()
            if "serialization_id" not in info.filename
        }


@pytest.mark.parametrize("together", [True, False])
def test_a_file_has_the_records_of_one_device(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded, "BLOCK", 16)
    (tmp_path / "alone").mkdir()

    def work(run: duoka.Run) -> None:
        model = Net()
        if run.is_first:
            torch.save(contents(model), tmp_path / "alone" / "net.pt")
        run.model(model, strategy="fsdp")
        if not together:
            sharded.machine_name = lambda: f"machine {run.rank}"
        BatchTensor.full_tensor = lambda self: pytest.fail("nothing is gathered whole")
        ranks = run._session.ranks
        write_together(contents(model), tmp_path / "net.pt", ranks, partial(on_first, ranks))

    on_ranks(3, work)
    assert records(tmp_path / "net.pt") == records(tmp_path / "alone" / "net.pt")
    found = torch.load(tmp_path / "net.pt", weights_only=False)
    assert found["net"].head.weight is found["net"].tied.weight
    assert found["net"].head.weight.data_ptr() == found["state"]["all.0"].data_ptr()
    assert [parameter.requires_grad for parameter in found["net"].parameters()] == [True, False, *[True] * 4]


def test_an_error_of_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    def work(run: duoka.Run) -> list[str]:
        model, ranks = run.model(Net(), strategy="fsdp"), run._session.ranks
        said = []
        for path, obj in ((tmp_path / "no" / "net.pt", model), (tmp_path / "net.pt", [lambda: model])):
            with pytest.raises(Exception) as raised:
                write_together(obj, path, ranks, partial(on_first, ranks))
            said.append(str(raised.value))
        return said

    for parent, function in on_ranks(2, work):
        assert "does not exist" in parent
        assert "<lambda>" in function


def test_an_object_without_sharded_tensors_is_written_as_it_is(tmp_path: Path) -> None:
    records = pickled.outline({"a": torch.arange(3), "b": torch.ones(2, 2)[:, 1]}, tmp_path / "a.pt")
    found: dict[str, Tensor] = torch.load(tmp_path / "a.pt")
    assert records == []
    assert found["a"].tolist() == [0, 1, 2]
    assert found["b"].tolist() == [1, 1]


@pytest.mark.parametrize("sizes", [(0, 5), (7, 0), (1000, 1), (123, 54321)])
def test_checksums_are_combined(sizes: tuple[int, int]) -> None:
    first, second = map(os.urandom, sizes)
    assert combine_sums(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
