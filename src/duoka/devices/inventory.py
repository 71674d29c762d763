"""The devices of this machine at one moment: GPUs, their users, and CPU cores.

Does not import torch and does not start CUDA: each worker does that on its own GPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

from duoka.devices import amd, cgroup, nvml
from duoka.devices.gpu import Gpu

__all__ = ["Gpu", "Inventory", "cores", "count_of", "read", "units"]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices of a machine.

    gpus: in PCI bus order. cores: available to this process. no_gpus: reason why there are no GPUs. driver, cuda:
    version of the NVIDIA driver, and the newest CUDA version that it runs. amd: AMD GPUs, which are shown and not
    chosen yet.
    """

    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    no_gpus: str = "this machine has no NVIDIA GPU"
    driver: str = ""
    cuda: str = ""
    amd: tuple[Gpu, ...] = ()


def units(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return the devices that a worker can use: whole GPUs, and the parts of split ones."""
    return [unit for gpu in gpus for unit in (gpu.parts if gpu.is_split else (gpu,))]


def read() -> Inventory:
    """Query this machine; milliseconds for each GPU.

    `allocation.with_holders` adds the runs that have locked them.
    """
    found = nvml.ask()
    others, why_not = amd.ask()
    no_gpus = "; ".join(filter(None, (found.why_none, why_not)))
    return Inventory(found.gpus, cores(), no_gpus, found.driver, found.cuda, others)


def cores() -> int:
    """Return the number of cores this process may use, by CPU affinity and the container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, cgroup.cores())))


def count_of(kind: str) -> int:
    """Return the number of devices of type `mps` or `xpu`. Imports torch."""
    import torch

    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return torch.xpu.device_count() if torch.xpu.is_available() else 0
