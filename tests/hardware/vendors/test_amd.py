from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from duoka.hardware import inventory
from duoka.hardware.choice import choose
from duoka.hardware.spec import parse
from duoka.hardware.vendors import amd, report
from duoka.hardware.vendors.report import Report


class SmiError(Exception):
    pass


def library(**answers: object) -> ModuleType:
    smi = ModuleType("amdsmi")
    smi.AmdSmiException = SmiError  # type: ignore[attr-defined]
    smi.amdsmi_init = smi.amdsmi_shut_down = lambda: None  # type: ignore[attr-defined]
    smi.amdsmi_get_processor_handles = lambda: [0]  # type: ignore[attr-defined]

    def fails(handle: object) -> object:
        raise SmiError("not supported")

    for name in ("gpu_vram_usage", "power_info", "gpu_asic_info", "gpu_activity", "gpu_device_uuid"):
        answer = answers.get(name)
        setattr(smi, f"amdsmi_get_{name}", fails if answer is None else lambda handle, answer=answer: answer)
    return smi


@pytest.fixture(autouse=True)
def amd_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(amd, "DRIVER", tmp_path / "kfd")


def test_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "gpu_vram_usage": {"vram_total": 196592, "vram_used": 283},
        "power_info": {"current_socket_power": 141, "average_socket_power": "N/A"},
        "gpu_asic_info": {"market_name": "AMD Instinct MI300X"},
        "gpu_activity": {"gfx_activity": 12},
        "gpu_device_uuid": "c4ff74a1-0000-1000-80a5-23e9d3f0b9a1",
    }
    monkeypatch.setitem(sys.modules, "amdsmi", library(**answers))
    (gpu,) = amd.ask().gpus
    assert (gpu.name, gpu.memory, gpu.used) == ("AMD Instinct MI300X", 196592 << 20, 283 << 20)
    assert (gpu.utilisation, gpu.power) == (12, 141)
    assert gpu.processes is None  # not answered
    seen = inventory.read()
    assert (seen.vendor, seen.gpus) == ("NVIDIA", ())  # this torch is not built for them
    choice = choose(parse("auto"), seen)
    assert choice.notes == ("there are also 1 AMD GPUs (torch here is not built for ROCm)",)
    assert [device.type for device in choice.devices] == ["cpu"]
    monkeypatch.setattr(amd, "torch_is_built_for", lambda word: word == "hip")
    (device,) = choose(parse("auto"), inventory.read()).devices
    assert (device.type, device.index, device.uuid) == ("cuda", 0, gpu.uuid)


def test_a_card_that_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", library())
    (gpu,) = amd.ask().gpus
    assert (gpu.name, gpu.memory, gpu.used, gpu.uuid) == ("AMD GPU", 0, None, "")


def test_a_driver_that_hangs_costs_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    smi = library()
    smi.amdsmi_init = lambda: over.wait(60)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    monkeypatch.setattr(report, "TIME_LIMIT", 0.05)
    assert amd.ask() == Report((), "the AMD driver has not responded for 0.05 s; look in dmesg for the cause")
    over.set()


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert amd.ask() == Report((), amd.NO_LIBRARY)
    assert "amdsmi, which comes with ROCm, is missing" in inventory.read().no_gpus
