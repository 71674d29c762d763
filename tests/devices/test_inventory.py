from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from duoka.devices import inventory


def test_reading_this_machine_does_not_import_torch() -> None:
    source = "import sys; from duoka.devices import inventory as i; print(i.read().cores, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == f"{inventory.cores()} False\n"


def test_no_driver_is_no_gpu_and_a_reason() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        found = inventory.read()
        assert found.gpus == ()
        assert "no NVIDIA driver answers here" in found.no_gpus
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has the driver")


def test_no_library_is_no_gpu_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert inventory.read().gpus == ()
    assert "nvidia-ml-py, which is missing" in inventory.read().no_gpus


@pytest.mark.gpu
def test_numbers_are_those_of_nvidia_smi() -> None:
    query = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [f"{gpu.index}, {gpu.uuid}, {gpu.name}" for gpu in inventory.read().gpus] == listed
    assert all(gpu.memory > 1 << 30 for gpu in inventory.read().gpus)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_cores_are_those_that_may_be_used() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(allowed)])
        assert inventory.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu.max": "nonsense\n"}, math.inf),
    ],
)
def test_a_containers_quota_is_read(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert inventory._quota(tmp_path) == cores
