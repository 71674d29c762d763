from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from duoka.errors import OptionError, RunError
from duoka.inference import files
from duoka.inference.files import check_kind, import_name, model_named, open_data, writer

THIS = "tests.inference.test_files"
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


# Outputs.


@pytest.mark.parametrize("ending", [".npy", ".jsonl"])
def test_the_file_is_there_when_it_is_whole(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out{ending}"
    one = writer(path, 4, {"model": "a"}, resume=False)
    one.write([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    one.keep()
    assert not path.exists()
    with pytest.raises(OptionError, match="go on with --resume, or remove both"):
        writer(path, 4, {"model": "a"}, resume=False)
    with pytest.raises(OptionError, match="--resume must be made of the same model"):
        writer(path, 4, {"model": "b"}, resume=True)
    one.write([torch.tensor([9.0, 9.0])])  # written, and not noted when the process is killed
    one.close()
    again = writer(path, 4, {"model": "a"}, resume=True)
    assert again.done == 2
    again.write([torch.tensor([5.0, 6.0]), torch.tensor([7.0, 8.0])])
    again.finish()
    again.close()
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name]
    with pytest.raises(OptionError, match="must be a new file"):
        writer(path, 4, {"model": "a"}, resume=True)
    if ending == ".npy":
        rows = numpy.load(path).tolist()
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["index"] for line in lines] == [0, 1, 2, 3]
        rows = [line["output"] for line in lines]
    assert rows == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_what_is_written_is_noted_from_time_to_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BETWEEN_NOTES", -1.0)
    one = writer(tmp_path / "out.jsonl", 2, {}, resume=False)
    one.write([{"label": "cat", "scores": torch.tensor([0.5, 0.5])}])
    assert json.loads(one.note.read_text())["done"] == 1
    one.close()
    again = writer(tmp_path / "out.jsonl", 2, {}, resume=True)
    assert again.done == 1
    again.close()


def test_outputs_that_were_written_in_part_are_written_again(tmp_path: Path) -> None:
    def interrupted() -> Any:
        yield 1.0
        raise KeyboardInterrupt

    class Interrupted(list[Any]):
        def __iter__(self) -> Any:
            return interrupted()

    one = writer(tmp_path / "out.jsonl", 3, {}, resume=False)
    one.write([0.0])
    with pytest.raises(KeyboardInterrupt):
        one.write(Interrupted([1.0, 2.0]))
    one.keep()
    one.close()
    with closing(writer(tmp_path / "out.jsonl", 3, {}, resume=True)) as again:
        again.write([1.0, 2.0])
        again.finish()
    assert [json.loads(line)["output"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_nothing_written_is_nothing_to_go_on_with(tmp_path: Path) -> None:
    one = writer(tmp_path / "out.jsonl", 2, {}, resume=False)
    one.keep()
    assert list(tmp_path.iterdir()) == []
    assert writer(tmp_path / "out.jsonl", 2, {}, resume=True).done == 0


def fill(path: Path, left: int | None = None) -> None:
    """Resume, and write 3 items one by one with a note each, in a process that dies after `left` calls."""
    files.BETWEEN_NOTES = -1.0

    def mortal(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            one_moment()
            result = function(*args, **how)
            one_moment()
            return result

        return call

    def one_moment() -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if left is not None:
        os.fsync = mortal(lambda file: None)
        os.rename, os.unlink, os.pwrite = mortal(os.rename), mortal(os.unlink), mortal(os.pwrite)
    one = writer(path, 3, {}, resume=True)
    for item in range(one.done, 3):
        one.write([torch.tensor([float(item)] * 3)])
        one_moment()
    one.finish()
    one.close()


@pytest.mark.parametrize("ending", [".npy", pytest.param(".jsonl", marks=pytest.mark.long)])
def test_killed_at_any_moment_nothing_is_lost_and_nothing_is_double(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a process dies here, not the machine
    for moments in count(1):
        path = tmp_path / str(moments) / f"out{ending}"
        path.parent.mkdir()
        pid = os.fork()
        if pid == 0:
            fill(path, moments)
            os._exit(0)
        killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
        if not path.exists():
            fill(path)
        if ending == ".npy":
            rows = numpy.load(path).tolist()
        else:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert [line["index"] for line in lines] == list(range(3))
            rows = [line["output"] for line in lines]
        assert rows == [[float(item)] * 3 for item in range(3)]
        if not killed:
            break
    assert moments > 20


def test_a_note_without_its_part_is_nothing(tmp_path: Path) -> None:
    one = writer(tmp_path / "out.npy", 2, {}, resume=False)
    one.note.write_text('{"done": 2}')
    assert writer(tmp_path / "out.npy", 2, {}, resume=True).done == 0


def test_a_folder_that_cannot_be_written_to_and_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = r"out\.npy\.part cannot be written: No space left on device"
    with closing(writer(tmp_path / "out.npy", 2, {}, resume=False)) as one, pytest.raises(RunError, match=said):
        one.write([torch.zeros(2)])
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OptionError, match="in a writable folder"):
        writer(tmp_path / "new.npy", 2, {}, resume=False)


@pytest.mark.parametrize(
    ("name", "outputs", "said"),
    [
        ("out.csv", [], "a name that ends in .jsonl or .npy"),
        ("no/out.npy", [], "in an existing folder"),
        ("out.npy", [torch.zeros(2), torch.zeros(3)], "item 1 gives"),
        ("out.npy", [{"a": torch.zeros(2)}], "a .jsonl file, as an output is a dict"),
    ],
)
def test_what_cannot_be(tmp_path: Path, name: str, outputs: list[object], said: str) -> None:
    with pytest.raises(OptionError, match=said), closing(writer(tmp_path / name, 2, {}, resume=False)) as one:
        one.write(outputs)
