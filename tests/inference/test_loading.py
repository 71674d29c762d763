from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from duoka.errors import OptionError
from duoka.inference.loading import check_kind, import_name, model_named, open_data

THIS = "tests.inference.test_loading"
LINEAR = nn.Linear(2, 1)


def make() -> nn.Module:
    return nn.Linear(2, 1)


def needy(classes: int) -> nn.Module:
    return nn.Linear(2, classes)


def empty() -> None:
    pass


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
        (f"{THIS}:needy", "it needs arguments: write a function"),
        (f"{THIS}:empty", "it returns NoneType"),
        ("nets.py:make", "write nets:make"),
    ],
)
def test_no_model(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        model_named(name)


def test_a_module_that_fails_fails_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import no_such_library")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_name("MODEL", "needs_more:x")


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
    numpy.save(tmp_path / "nothing.npy", numpy.zeros((0, 4)))
    numpy.save(tmp_path / "words.npy", numpy.array(["a", "b"]))
    (tmp_path / "short.npy").write_bytes((tmp_path / "words.npy").read_bytes()[:130])
    (tmp_path / "junk.npy").write_bytes(b"hello, I am no array")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.xyz").write_text("")
    for name, said in (
        ("none.npy", "it is not there"),
        ("empty", "this folder is empty"),
        ("objects.npy", "memory-mapped"),
        ("scalar.npy", "has no rows"),
        ("nothing.npy", "has no rows"),
        ("words.npy", "of <U1, which are not numbers"),
        ("short.npy", "it cannot be read as one: mmap length is greater"),
        ("junk.npy", "it cannot be read as one: the magic string is not correct"),
        ("odd", "--read module:function reads other files"),
    ):
        with pytest.raises(OptionError, match=said):
            open_data(tmp_path / name)
    assert len(open_data(tmp_path / "odd", len)) == 1


def test_doubles_for_a_model_of_floats_are_told(tmp_path: Path) -> None:
    path = tmp_path / "doubles.npy"
    numpy.save(path, numpy.ones((2, 2)))
    with pytest.raises(OptionError, match=r"an array of float32, as the model's weights are.*astype\('float32'\)"):
        check_kind(open_data(path), path, LINEAR)
    check_kind(open_data(path), path, nn.Linear(2, 1).double())
    check_kind(numpy.ones(2, numpy.int64), path, LINEAR)
