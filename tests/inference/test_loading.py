from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from duoka.errors import OptionError
from duoka.inference.loading import model_named, named, open_data

THIS = "tests.inference.test_loading"
LINEAR = nn.Linear(2, 1)


def make() -> nn.Module:
    return nn.Linear(2, 1)


def test_a_model_by_its_name() -> None:
    assert model_named(f"{THIS}:LINEAR") is LINEAR
    assert isinstance(model_named(f"{THIS}:make"), nn.Linear)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nets", "written as module:name"),
        (":make", "written as module:name"),
        ("no_such_module:make", "there is no no_such_module"),
        ("tests.no_such:make", "there is no tests.no_such"),
        (f"{THIS}:mak", f"{THIS} has no mak"),
        (f"{THIS}:THIS", "a function without arguments that returns one"),
    ],
)
def test_no_model(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        model_named(name)


def test_a_module_that_fails_fails_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import no_such_library")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        named("MODEL", "needs_more:x")


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for index in (2, 0, 1):
        numpy.save(tmp_path / f"{index}.npy", numpy.full(3, float(index)))
    torch.save(torch.full((3,), 3.0), tmp_path / "3.pt")
    (tmp_path / ".hidden").write_text("")
    items = open_data(tmp_path)
    assert [item[0].item() for item in items] == [0, 1, 2, 3]
    assert [item[0].item() for item in items[2:]] == [2, 3]
    assert list(open_data(tmp_path, lambda path: path.stem)) == ["0", "1", "2", "3"]


def test_rows_of_an_array_stay_on_the_disk(tmp_path: Path) -> None:
    numpy.save(tmp_path / "rows.npy", numpy.arange(6).reshape(3, 2))
    assert isinstance(open_data(tmp_path / "rows.npy"), numpy.memmap)


def test_no_data(tmp_path: Path) -> None:
    numpy.save(tmp_path / "objects.npy", numpy.array([{}], dtype=object), allow_pickle=True)
    numpy.save(tmp_path / "scalar.npy", numpy.array(1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.xyz").write_text("")
    for name, said in (
        ("none.npy", "it is not there"),
        ("empty", "this folder is empty"),
        ("objects.npy", "memory-mapped"),
        ("scalar.npy", "has no rows"),
    ):
        with pytest.raises(OptionError, match=said):
            open_data(tmp_path / name)
    with pytest.raises(OptionError, match="--read module:function reads other files"):
        open_data(tmp_path / "odd")[0]
