from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch

import duoka
from duoka.system.user_code import after_import, is_standard, is_users


@pytest.mark.parametrize(
    ("file", "standard", "users"),
    [
        (json.__file__, True, False),
        ("<frozen importlib._bootstrap>", True, False),
        ("<string>", True, False),
        (torch.__file__, False, False),
        (numpy.__file__, False, False),
        (duoka.__file__, False, False),
        (__file__, False, True),
        ("/home/someone/train.py", False, True),
        ("/home/someone/.local/lib/python3.11/site-packages/datasets/builder.py", False, False),
        ("/usr/lib/python3/dist-packages/datasets/builder.py", False, False),
        ("train.py", False, True),
        ("/home/someone/.local/bin/duoka", False, False),
    ],
)
def test_whose_a_file_is(file: str, standard: bool, users: bool) -> None:
    assert (is_standard(file), is_users(file)) == (standard, users)


def test_a_module_that_is_imported_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited").mkdir()
    (tmp_path / "awaited" / "__init__.py").write_text("from awaited import part")
    (tmp_path / "awaited" / "part.py").write_text("value = 3\nseen_by = __spec__.loader.__class__.__name__")
    monkeypatch.syspath_prepend(tmp_path)
    finders, seen = list(sys.meta_path), []

    def note(module: ModuleType) -> None:
        seen.append((module.__name__, module.value))
        raise ValueError("the script must not see this")

    after_import("awaited.part", note)
    after_import("awaited.missing", seen.append)
    module = importlib.import_module("awaited")
    assert seen == [("awaited.part", 3)]
    assert module.part.seen_by == "SourceFileLoader"
    assert "exec_module" not in vars(module.part.__spec__.loader)
    with pytest.raises(ModuleNotFoundError, match=r"awaited\.missing"):
        importlib.import_module("awaited.missing")
    assert sys.meta_path == finders


def test_a_module_that_is_there() -> None:
    seen: list[ModuleType] = []
    after_import("os", seen.append)
    assert seen == [sys.modules["os"]]
