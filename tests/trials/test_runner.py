from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from duoka.errors import RunError
from duoka.trials.runner import Stopped, render_table, trial_runner


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_nothing_is_left_of_a_stage(home: Path) -> None:
    with trial_runner("prove", None) as one:
        (one.folder / "seen").write_text("much")
    assert list(home.iterdir()) == []


def test_what_a_killed_command_left_is_removed_and_a_living_one_s_is_not(home: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    ends = (f"{ended.pid}-x", f"{os.getppid()}-y", "notes")
    left, used, other = (home / f"duoka-prove-{end}" for end in ends)
    for folder in (left, used, other):
        folder.mkdir()
    with trial_runner("prove", None):
        assert (left.exists(), used.exists(), other.exists()) == (False, True, True)


def test_a_folder_that_cannot_be_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(home / "file"))
    with pytest.raises(RunError, match="cannot be made: Not a directory"), trial_runner("prove", None):
        pass


def test_a_signal_ends_what_is_on_it() -> None:
    with trial_runner("prove", None) as one:
        one.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped) as stopped:
            one.check()
    assert stopped.value.code == 143


def test_a_table_that_is_not_for_a_terminal_is_not_cut_at_its_width() -> None:
    lines = render_table("a title", ("what", "why"), [("a", "word " * 30)]).splitlines()
    assert lines[0].strip() == "a title"
    head, row = lines[2], lines[4]
    assert [cell.strip() for cell in head.split("┃")[1:-1]] == ["what", "why"]
    assert row.count("word") == 30
