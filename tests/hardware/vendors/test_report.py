from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from duoka.hardware.vendors import report
from duoka.hardware.vendors.report import on_bus, output, torch_is_built_for


def test_cards_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, vendor, kind in (
        ("0000:01:00.0", "0x10de", "0x030000"),
        ("0000:41:00.0", "0x10de", "0x030200"),
        ("0000:01:00.1", "0x10de", "0x040300"),  # its sound
        ("0000:02:00.0", "0x1002", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    (tmp_path / "odd").mkdir()
    monkeypatch.setattr(report, "PCI", tmp_path)
    assert on_bus("0x10de") == ["0000:01:00.0", "0000:41:00.0"]
    monkeypatch.setattr(report, "PCI", tmp_path / "none")
    assert on_bus("0x10de") == []


def test_what_torch_is_built_for() -> None:
    for word in ("cuda", "hip", "xpu"):
        assert torch_is_built_for(word) == bool(getattr(torch.version, word))


def test_a_program_of_a_driver_that_fails_or_is_missing() -> None:
    assert output(sys.executable, "-c", "print(3)") == "3\n"
    with pytest.raises(OSError, match="no card"):
        output(sys.executable, "-c", "import sys; sys.exit('no card')")
    with pytest.raises(OSError, match="no-such-program"):
        output("no-such-program")
