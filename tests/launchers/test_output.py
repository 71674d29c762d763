from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from duoka.errors import OptionError
from duoka.launchers.processes import Outputs


@pytest.fixture(autouse=True)
def _temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def write(outputs: Outputs, rank: int, text: str) -> None:
    file = outputs.files.get(rank)
    assert file is not None
    os.write(file.fileno(), text.encode())


def test_files_without_a_name_are_nowhere_until_they_are_kept(tmp_path: Path) -> None:
    outputs = Outputs(None, range(1, 3))
    write(outputs, 1, "one\n")
    assert list((tmp_path / "tmp").iterdir()) == []
    kept = outputs.keep({})
    outputs.close()
    assert kept is not None
    assert {path.name: path.read_text() for path in kept.iterdir()} == {"rank1.log": "one\n"}
    assert kept.parent == tmp_path / "tmp"


def test_nothing_is_kept_where_nothing_was_written(tmp_path: Path) -> None:
    outputs = Outputs(None, range(1, 3))
    assert outputs.keep({}) is None
    outputs.close()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_what_is_added_is_kept_beside_them() -> None:
    outputs = Outputs(None, range(1, 2))
    kept = outputs.keep({"rank1.stacks": "stack"})
    outputs.close()
    assert kept is not None
    assert (kept / "rank1.stacks").read_text() == "stack"


def test_files_in_a_folder_are_there_at_once_and_begin_empty(tmp_path: Path) -> None:
    folder = tmp_path / "new/logs"
    for text in ("first run\n", "second\n"):
        outputs = Outputs(folder, range(1, 3))
        write(outputs, 2, text)
        assert (folder / "rank2.log").read_text() == text
        assert outputs.keep({}) == folder
        outputs.close()
    assert sorted(path.name for path in folder.iterdir()) == ["rank1.log", "rank2.log"]


def test_a_restart_writes_beside_what_was_before(tmp_path: Path) -> None:
    outputs = Outputs(tmp_path, range(1, 2))
    write(outputs, 1, "first\n")
    outputs.begin(1)
    write(outputs, 1, "second\n")
    assert outputs.keep({}) == tmp_path / "restart1"
    outputs.close()
    assert (tmp_path / "rank1.log").read_text() == "first\n"
    assert (tmp_path / "restart1/rank1.log").read_text() == "second\n"


def test_what_is_kept_of_one_attempt_has_nothing_of_another() -> None:
    outputs = Outputs(None, range(1, 2))
    kept = []
    for attempt, text in enumerate(("first\n", "second\n")):
        outputs.begin(attempt)
        write(outputs, 1, text)
        kept.append(outputs.keep({}))
    outputs.close()
    assert [folder and (folder / "rank1.log").read_text() for folder in kept] == ["first\n", "second\n"]


def test_the_first_rank_has_no_file() -> None:
    outputs = Outputs(None, range(1, 2))
    assert outputs.files.get(0) is None
    assert outputs.tail(0, 5) == []
    outputs.close()


@pytest.mark.parametrize(
    ("text", "tail"),
    [
        ("", []),
        ("a\nb", ["a", "b"]),
        ("a\nb\nc\nd\n", ["b", "c", "d"]),
        ("x" * 10_000 + "\nend\n", ["x" * 300, "end"]),
        ("é" * 10_000, ["é" * 300]),
    ],
)
def test_the_last_lines(text: str, tail: list[str]) -> None:
    outputs = Outputs(None, range(1, 2))
    write(outputs, 1, text)
    assert outputs.tail(1, 3) == tail
    outputs.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"--log-dir must be a directory that can be written, but .*logs"):
        Outputs(tmp_path / "file/logs", range(1, 2))


def test_no_folder_is_made_for_nobody(tmp_path: Path) -> None:
    Outputs(tmp_path / "logs", range(1, 1)).close()
    assert not (tmp_path / "logs").exists()


def test_a_full_disk_does_not_hide_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = Outputs(None, range(1, 2))
    write(outputs, 1, "text")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    assert outputs.keep({}) is None
    outputs.close()
