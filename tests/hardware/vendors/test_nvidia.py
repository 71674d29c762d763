from __future__ import annotations

import os

import pytest

from duoka.hardware.vendors import nvidia, report
from tests.hardware.driver import play, put


def test_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "one")
    answer = nvidia.ask()
    (gpu,) = answer.gpus
    assert (*answer.versions.values(), answer.why_none) == ("550.54.15", "12.4", "")
    assert (gpu.index, gpu.name, gpu.uuid[:12]) == (0, "NVIDIA H200", "GPU-3c1a6d0e")
    assert (gpu.memory, gpu.used, gpu.free_memory) == (150754820096, 651165696, 150103654400)
    assert (gpu.utilisation, gpu.temperature, gpu.power, gpu.power_limit) == (0, 31, 76.543, 700.0)
    assert (gpu.processes, gpu.parts, gpu.problem) == ((), (), "")


def test_eight_cards_and_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = play(monkeypatch, "eight")
    recording["cards"][0]["nvmlDeviceGetComputeRunningProcesses_v3"][0]["pid"] = os.getpid()
    gpus = nvidia.ask().gpus
    assert [gpu.index for gpu in gpus] == list(range(8))
    (mine,) = gpus[0].processes or ()
    assert (mine.pid, mine.kind, mine.memory) == (os.getpid(), "compute", 70 << 30)
    assert "python" in mine.command
    assert [process.memory for process in gpus[2].processes or ()] == [9 << 30, 8 << 30]
    (desktop,) = gpus[1].processes or ()
    assert (desktop.kind, desktop.user, desktop.command) == ("graphics", "", "")


@pytest.mark.parametrize(
    ("recording", "why"),
    [
        ("none", "the NVIDIA driver sees no GPU"),
        ("no-driver", "no NVIDIA driver answers here (NVML Shared Library Not Found)"),
        ("driver-not-loaded", "no NVIDIA driver answers here (Driver Not Loaded)"),
        ("driver-updated", "no NVIDIA driver answers here (RM has detected an NVML/RM version mismatch.)"),
    ],
)
def test_no_gpu_and_the_reason(recording: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, recording)
    assert nvidia.ask().gpus == ()
    assert nvidia.ask().why_none == why


def test_parts_of_a_split_card(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "mig")
    (gpu,) = nvidia.ask().gpus
    assert gpu.is_split
    assert gpu.utilisation is None
    assert [(part.index, part.uuid[:12], part.used) for part in gpu.parts] == [
        (0, "MIG-11111111", 6 << 30),
        (2, "MIG-22222222", 3 << 20),
    ]
    assert [len(part.processes or ()) for part in gpu.parts] == [1, 0]
    assert [part.number for part in gpu.parts] == ["0:0", "0:2"]
    assert [part.problem for part in (gpu, *gpu.parts)] == ["", "", ""]


def test_processes_of_parts_where_the_driver_tells_those_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = play(monkeypatch, "mig")
    for part in filter(None, recording["cards"][0]["parts"]):
        del part["nvmlDeviceGetComputeRunningProcesses_v3"]
    (gpu,) = nvidia.ask().gpus
    assert [len(part.processes or ()) for part in gpu.parts] == [1, 0]


def test_a_card_that_fails_in_the_middle_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "lost")
    whole, half, gone = nvidia.ask().gpus
    assert whole.problem == ""
    assert (half.name, half.temperature, half.processes, half.problem) == (
        "NVIDIA GeForce RTX 3060",
        None,
        None,
        "GPU is lost",
    )
    assert (gone.index, gone.uuid, gone.problem) == (2, "", "GPU is lost")


def test_what_may_not_be_asked_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "no-permission")
    shown, hidden = nvidia.ask().gpus
    assert (shown.processes, shown.utilisation, shown.problem) == (None, None, "")
    assert "does not let this user see it" in hidden.problem


def test_an_old_driver_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "old-driver")
    answer = nvidia.ask()
    assert tuple(answer.versions.values()) == ("470.223.02", "11.4")
    (gpu,) = answer.gpus
    assert [process.memory for process in gpu.processes or ()] == [5 << 30]
    assert (gpu.power, gpu.power_limit, gpu.utilisation, gpu.capability) == (None, None, 77, "3.7")


def test_a_driver_older_than_that_still_shows_its_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "oldest-driver")
    answer = nvidia.ask()
    assert tuple(answer.versions.values()) == ("418.87", "10.1")
    (gpu,) = answer.gpus
    assert (gpu.name, gpu.used, gpu.processes, gpu.problem) == ("Tesla K80", 5 << 30, None, "")


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetUUID"])
def test_a_driver_that_hangs_costs_the_time_limit(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = play(monkeypatch, "eight") | {"hangs": function}
    driver = put(monkeypatch, recording)
    assert driver is not None
    monkeypatch.setattr(report, "TIME_LIMIT", 0.05)
    answer = nvidia.ask()
    assert answer.gpus == ()
    assert "has not responded for 0.05 s" in answer.why_none
    if function == "nvmlInitWithFlags":
        assert nvidia.links() == []
    driver.over.set()


def test_a_meter_that_is_broken_is_no_broken_card(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = play(monkeypatch, "one")
    recording["cards"][0]["nvmlDeviceGetPowerUsage"] = {"error": 999}
    assert [(gpu.power, gpu.problem) for gpu in nvidia.ask().gpus] == [(None, "")]
    recording["cards"][0]["nvmlDeviceGetMemoryInfo"] = {"error": 999}
    assert [gpu.problem for gpu in nvidia.ask().gpus] == ["Unknown Error"]


def test_memory_that_the_driver_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = play(monkeypatch, "eight")
    recording["cards"][0]["nvmlDeviceGetComputeRunningProcesses_v3"][0]["usedGpuMemory"] = None
    (process,) = nvidia.ask().gpus[0].processes or ()
    assert process.memory is None


def test_links_between_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = play(monkeypatch, "eight")
    links = nvidia.links()
    assert len(links) == 28
    assert {(link.direct, link.nvlinks) for link in links} == {(True, 12)}
    put(monkeypatch, recording | {"cards": recording["cards"][:1]})
    assert nvidia.links() == []
    play(monkeypatch, "lost")
    assert [(link.first, link.second, link.nvlinks) for link in nvidia.links()] == [(0, 1, 0)]
    play(monkeypatch, "no-driver")
    assert nvidia.links() == []
