from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from duoka.system.imports import after_import


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
