from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from duoka.devices import inventory
from duoka.devices.gpu import Gpu
from duoka.devices.inventory import Inventory
from duoka.doctor.versions import (
    check_cuda,
    check_driver,
    check_engine,
    check_kernels,
    check_torch,
    check_tried,
    examine,
    nvidia_cards,
)
from tests.devices.driver import play

CARD = Gpu(0, "GPU-1", "H200", 1 << 37)


def test_gpus_on_which_no_test_has_run() -> None:
    (found,) = check_tried([CARD, replace(CARD, index=1), replace(CARD, name="H100")], {"H100"})
    assert found.what == "duoka's tests have not run on H200, only on simulated GPUs"
    assert "make gpu" in found.todo
    assert not list(check_tried([CARD], {"H200"}))


@pytest.mark.parametrize(
    ("version", "level"), [("2.13.0+cpu", "ok"), ("2.10.0", "ok"), ("2.9.1+cu126", "fault"), ("2.99.0", "advice")]
)
def test_torch(version: str, level: str) -> None:
    assert check_torch(version).level == level


def test_without_the_engine_in_c_it_says_so() -> None:
    assert check_engine(True).level == "ok"
    assert check_engine(False).level == "advice"
    assert "compiler" in check_engine(False).todo


@pytest.mark.parametrize(
    ("built", "runs", "level"),
    [
        ("12.6", "12.4", "ok"),
        ("13.0", "12.4", "fault"),
        ("12.6", "13.0", "ok"),
        (None, "12.4", "fault"),
        ("12.6", "", "ok"),
    ],
)
def test_cuda_and_the_driver(built: str | None, runs: str, level: str) -> None:
    assert check_cuda(built, Inventory((CARD,), 8, "", "550.54", runs)).level == level


@pytest.mark.parametrize(
    ("recording", "cards", "levels"),
    [
        ("one", 1, ["ok"]),
        ("no-driver", 0, []),
        ("no-driver", 1, ["advice"]),
        ("driver-not-loaded", 2, ["fault"]),
        ("driver-updated", 1, ["fault"]),
        ("none", 1, ["fault"]),
    ],
)
def test_cards_that_no_driver_answers_for(
    recording: str, cards: int, levels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, recording)
    findings = list(check_driver(inventory.read(), cards))
    assert [finding.level for finding in findings] == levels
    assert all("on the PCI bus, and " in finding.what for finding in findings if finding.level != "ok")


def test_cards_on_the_bus(tmp_path: Path) -> None:
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
    assert nvidia_cards(tmp_path) == ["0000:01:00.0", "0000:41:00.0"]
    assert nvidia_cards(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("sm_80 sm_90", "9.0", True),
        ("sm_80", "8.6", True),  # the same generation
        ("sm_86", "8.0", False),
        ("sm_80", "9.0", False),
        ("sm_80 compute_80", "9.0", True),  # translated when it is first used
        ("sm_90a", "9.0", True),
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", "12.0", False),
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120", "12.0", True),
        ("sm_80", "3.7", False),
        ("gfx942", "9.0", False),
        ("", "", True),  # the driver does not tell
    ],
)
def test_torch_has_code_for_a_card(built: str, capability: str, runs: bool) -> None:
    findings = list(check_kernels(built.split(), [replace(CARD, capability=capability)]))
    assert [finding.level for finding in findings] == ["fault"] * (not runs)


def test_gloo_and_nccl_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "eight")
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    levels = {finding.subject: finding.level for finding in examine()}
    assert (levels["gloo"], levels["NCCL"]) == ("fault", "fault")


def test_cuda_is_not_needed_without_a_card() -> None:
    assert check_cuda(None, Inventory()).level == "ok"
