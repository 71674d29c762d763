"""What this machine has: its GPUs as the driver counts them, and its processor cores.

Does not import torch, and does not start CUDA: the workers do that, each on its own card.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU.

    index: its number in PCI bus order, which is nvidia-smi's. memory: in bytes.
    """

    index: int
    uuid: str
    name: str
    memory: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a machine has.

    gpus: in PCI bus order. cores: how many this process may use. no_gpus: why there are no GPUs, in words.
    """

    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    no_gpus: str = "this machine has no NVIDIA GPU"


def read() -> Inventory:
    """Look at this machine. Takes milliseconds."""
    gpus, why_none = _gpus()
    return Inventory(gpus, cores(), why_none)


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs, or why there are none."""
    try:
        import pynvml
    except ImportError:
        return (), "GPUs are found through the package nvidia-ml-py, which is missing"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"no NVIDIA driver answers here ({error})"
    try:
        found = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        return found, "" if found else "the NVIDIA driver sees no GPU"
    except pynvml.NVMLError as error:
        return (), f"the NVIDIA driver reports an error ({error})"
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # a GPU that shares the processor's memory has no figure of its own
        memory = 0
    return Gpu(index, nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), memory)


def cores() -> int:
    """How many processor cores this process may use: by its affinity and by its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, _quota(Path("/sys/fs/cgroup")))))


def _quota(cgroup: Path) -> float:
    """The container's limit in cores, infinite where there is none. Knows cgroup v2 and v1."""
    try:
        if (cgroup / "cpu.max").exists():
            limit, period = (cgroup / "cpu.max").read_text().split()
        else:
            limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if limit != "max" and int(limit) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


def count_of(kind: str) -> int:
    """How many devices of type `mps` or `xpu` torch can use here. Imports torch: ask only when asked to."""
    import torch

    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return torch.xpu.device_count() if torch.xpu.is_available() else 0
