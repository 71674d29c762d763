from __future__ import annotations

import os

import pytest

from duoka.devices import nvml
from tests.devices.driver import driver, play


def test_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "one")
    answer = nvml.ask()
    (gpu,) = answer.gpus
    assert (answer.driver, answer.cuda, answer.why_none) == ("550.54.15", "12.4", "")
    assert (gpu.index, gpu.name, gpu.uuid[:12]) == (0, "NVIDIA H200", "GPU-3c1a6d0e")
    assert (gpu.memory, gpu.used, gpu.free_memory) == (150754820096, 651165696, 150103654400)
    assert (gpu.utilisation, gpu.temperature, gpu.power, gpu.power_limit) == (0, 31, 76.543, 700.0)
    assert (gpu.processes, gpu.parts, gpu.problem) == ((), (), "")


def test_eight_cards_and_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = play(monkeypatch, "eight")
    recording["cards"][0]["nvmlDeviceGetComputeRunningProcesses"][0]["pid"] = os.getpid()
    gpus = nvml.ask().gpus
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
    ],
)
def test_no_gpu_and_the_reason(recording: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, recording)
    assert nvml.ask().gpus == ()
    assert nvml.ask().why_none == why


def test_parts_of_a_split_card(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "mig")
    (gpu,) = nvml.ask().gpus
    assert gpu.is_split
    assert gpu.utilisation is None
    assert [(part.index, part.uuid[:12], part.used) for part in gpu.parts] == [
        (0, "MIG-11111111", 6 << 30),
        (2, "MIG-22222222", 3 << 20),
    ]
    assert [len(part.processes or ()) for part in gpu.parts] == [1, 0]
    assert gpu.problem == ""


def test_a_card_that_fails_in_the_middle_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "lost")
    whole, half, gone = nvml.ask().gpus
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
    shown, hidden = nvml.ask().gpus
    assert (shown.processes, shown.utilisation, shown.problem) == (None, None, "")
    assert "does not let this user see it" in hidden.problem


def test_an_old_driver_is_asked_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "old-driver")
    answer = nvml.ask()
    assert (answer.driver, answer.cuda) == ("418.87", "10.1")
    assert [process.memory for process in answer.gpus[0].processes or ()] == [5 << 30]
    assert answer.gpus[0].power is None


def test_links_between_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = play(monkeypatch, "eight")
    links = nvml.links()
    assert len(links) == 28
    assert {(link.direct, link.nvlinks) for link in links} == {(True, nvml.NVLINKS)}
    monkeypatch.setitem(__import__("sys").modules, "pynvml", driver(recording | {"cards": recording["cards"][:1]}))
    assert nvml.links() == []
    play(monkeypatch, "no-driver")
    assert nvml.links() == []
