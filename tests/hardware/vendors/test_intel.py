from __future__ import annotations

import json
from typing import Any

import pytest

from duoka.hardware.vendors import intel

ANSWERS: dict[tuple[str, ...], Any] = {
    ("discovery",): {
        "device_list": [
            {"device_id": 0, "device_name": "Intel Max 1550", "pci_bdf_address": "0000:29:00.0", "uuid": "7"}
        ]
    },
    ("discovery", "-d", "0"): {"memory_physical_size_byte": "68719476736"},
    ("stats", "-d", "0"): {
        "device_level": [
            {"metrics_type": "XPUM_STATS_MEMORY_USED", "value": 512.0},
            {"metrics_type": "XPUM_STATS_GPU_UTILIZATION", "value": 3},
            {"metrics_type": "XPUM_STATS_POWER", "value": 120.5},
        ]
    },
    ("ps",): {"device_util_by_proc_list": [{"device_id": 0, "process_id": 4194301}]},
}


@pytest.fixture(autouse=True)
def bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intel, "torch_is_built_for", lambda word: word == "xpu")
    monkeypatch.setattr(intel, "on_bus", lambda vendor: ["0000:29:00.0", "0000:3a:00.0"])


def test_cards_and_their_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intel.shutil, "which", lambda name: name)
    monkeypatch.setattr(intel, "output", lambda tool, *words: json.dumps(ANSWERS[words[:-1]]))
    first, second = intel.ask().gpus
    assert (first.index, first.uuid, first.name, first.memory) == (0, "INTEL-7", "Intel Max 1550", 1 << 36)
    assert (first.used, first.utilisation, first.power) == (512 << 20, 3, 120.5)
    assert [user.pid for user in first.processes or ()] == [4194301]
    assert (second.index, second.uuid, second.name, second.processes) == (1, "INTEL-0000:3a:00.0", "Intel GPU", ())


def test_without_the_vendor_s_program_there_are_only_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intel.shutil, "which", lambda name: None)
    assert [(gpu.uuid, gpu.memory, gpu.used, gpu.processes) for gpu in intel.ask().gpus] == [
        ("INTEL-0000:29:00.0", 0, None, None),
        ("INTEL-0000:3a:00.0", 0, None, None),
    ]


def test_a_program_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*words: str) -> str:
        raise OSError("no access")

    monkeypatch.setattr(intel.shutil, "which", lambda name: name)
    monkeypatch.setattr(intel, "output", fails)
    assert intel.ask().why_none == "the Intel driver does not answer (no access)"


def test_other_builds_of_torch_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intel, "torch_is_built_for", lambda word: False)
    assert intel.ask().gpus == ()
