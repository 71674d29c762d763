from __future__ import annotations

import json
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest

from duoka.cli import gpus as table
from duoka.hardware import inventory
from duoka.hardware.gpu import Gpu, GpuProcess, Holder
from duoka.hardware.machine import Machine
from tests.hardware.driver import play

HERE = Machine("box", "A Processor", 2, (1.0, 0.5, 0.25), 16 << 30, 4 << 30)


def shown(monkeypatch: pytest.MonkeyPatch, recording: str, processes: bool = False) -> list[str]:
    play(monkeypatch, recording)
    return table.lines(inventory.read(), HERE, processes)


def test_without_a_gpu_the_processor_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, "no-driver") == [
        "box: no GPU (no NVIDIA driver answers here (NVML Shared Library Not Found))",
        "CPU  A Processor  2 cores  load 1.00 0.50 0.25  memory 4.0/16.0 GiB",
    ]


def test_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, "one") == [
        "box: driver 550.54.15, CUDA 12.4",
        "GPU  name         UUID          memory GiB  util  temp  power W  who",
        "0    NVIDIA H200  GPU-3c1a6d0e  0.6/140.4   0%    31C   77/700   free",
    ]


def test_who_uses_eight_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, "eight")
    assert len(lines) == 10
    assert lines[2].endswith("?: (not visible from here) (pid 4194301, 70.0 GiB)")
    assert lines[7].endswith("40.0 GiB are in use by processes that cannot be seen from here")
    assert len(shown(monkeypatch, "eight", processes=True)) == 14


def test_parts_trouble_and_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    mig = shown(monkeypatch, "mig")
    assert [line.split()[0] for line in mig[2:]] == ["0", "0:0", "0:2"]
    assert mig[2].endswith("split into 2 parts (MIG)")
    lost = shown(monkeypatch, "lost")
    assert lost[3].endswith("not usable: GPU is lost")
    assert lost[4].split()[:2] == ["2", "GPU"]
    assert shown(monkeypatch, "no-permission")[2].endswith("the driver does not report who uses it")


def test_a_run_and_long_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "one")
    found = inventory.read()
    process = GpuProcess(12, "compute", 3 << 30, "bob", "python " + "x" * 100)
    gpu = replace(found.gpus[0], processes=(process,), holder=Holder(11, "duoka run train.py", 0.0))
    used = replace(found, gpus=(gpu,))
    (line,) = table.lines(used, HERE)[2:]
    assert "duoka run train.py (pid 11); bob: python xxx" in line
    assert "x… (pid 12, 3.0 GiB)" in line
    assert table.lines(used, HERE, processes=True)[3].strip() == f"bob: {process.command} (pid 12, 3.0 GiB)"


def test_since_when_and_of_which_run(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "one")
    found = inventory.read()
    now, long_ago = time.time(), time.mktime((2026, 1, 2, 3, 4, 0, 0, 0, -1))
    process = GpuProcess(12, "compute", None, "bob", "python a.py", since=now, run="rank 1 of run 11")
    gpu = replace(found.gpus[0], processes=(process,), holder=Holder(11, "duoka run train.py", long_ago))
    (line,) = table.lines(replace(found, gpus=(gpu,)), HERE)[2:]
    clock = time.strftime("%H:%M", time.localtime(now))
    assert f"bob: python a.py (pid 12, rank 1 of run 11, since {clock})" in line
    assert "duoka run train.py (pid 11, since 2026-01-02 03:04)" in line


def test_a_run_that_has_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "mig")
    found = inventory.read()
    (gpu,) = found.gpus
    parts = (gpu.parts[0], replace(gpu.parts[1], holder=Holder(11, "duoka run train.py", 0.0)))
    lines = table.lines(replace(found, gpus=(replace(gpu, parts=parts),)), HERE)
    assert lines[4].endswith("duoka run train.py (pid 11)")


def test_every_field_of_the_json_is_in_the_docs() -> None:
    page = (
        (Path(__file__).parents[2] / "docs/devices.md")
        .read_text()
        .partition("### As data")[2]
        .partition("## Pick")[0]
    )
    names = {field.name for kind in (Gpu, GpuProcess, Holder, Machine, inventory.Inventory) for field in fields(kind)}
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_json_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "eight")
    data = json.loads(json.dumps(table.as_data(inventory.read(), HERE)))
    assert data["machine"]["host"] == "box"
    assert data["gpus"][2]["processes"][0] == {
        "pid": 4194302,
        "kind": "compute",
        "memory": 9 << 30,
        "user": "",
        "command": "",
        "since": None,
        "run": "",
    }
