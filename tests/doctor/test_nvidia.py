from __future__ import annotations

from dataclasses import replace

import pytest

from duoka.doctor.nvidia import check_cuda, check_driver, check_kernels
from duoka.hardware import inventory
from duoka.hardware.gpu import Gpu
from duoka.hardware.inventory import Inventory
from tests.hardware.driver import play

CARD = Gpu(0, "GPU-1", "H200", 1 << 37)


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
    assert check_cuda(built, Inventory((CARD,), 8, "", {"driver": "550.54", "CUDA": runs})).level == level


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


def test_cuda_is_not_needed_without_a_card() -> None:
    assert check_cuda(None, Inventory()).level == "ok"
