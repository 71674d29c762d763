from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pynvml
import pytest

from duoka.hardware import inventory


def test_reading_this_machine_does_not_import_torch() -> None:
    source = "import sys; from duoka.hardware import inventory as i; print(i.read().cores, 'torch' in sys.modules)"
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
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="the GPUs are of another vendor")
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
