"""What this machine has, at one moment: its GPUs and who uses them, and its processor cores.

Does not import torch, and does not start CUDA: the workers do that, each on its own card.
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
    """What a machine has.

    gpus: in PCI bus order. cores: how many this process may use. no_gpus: why there are no GPUs, in words.
    driver, cuda: the version of the NVIDIA driver, and the newest CUDA that it runs.
    amd: AMD cards, which are shown and not yet chosen.
    """

    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    no_gpus: str = "this machine has no NVIDIA GPU"
    driver: str = ""
    cuda: str = ""
    amd: tuple[Gpu, ...] = ()

    def units(self) -> list[Gpu]:
        """What a worker can be given: whole cards, and in place of those that are split their parts."""
        return units(self.gpus)


def units(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Whole cards as they are, and in place of those that are split their parts."""
    return [unit for gpu in gpus for unit in (gpu.parts if gpu.is_split else (gpu,))]


def read() -> Inventory:
    """Look at this machine. Takes milliseconds for each GPU. Who of duoka holds them, `taking.marked` adds."""
    found = nvml.ask()
    others, why_not = amd.ask()
    no_gpus = "; ".join(filter(None, (found.why_none, why_not)))
    return Inventory(found.gpus, cores(), no_gpus, found.driver, found.cuda, others)


def cores() -> int:
    """How many processor cores this process may use: by its affinity and by its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, cgroup.cores())))


def count_of(kind: str) -> int:
    """How many devices of type `mps` or `xpu` torch can use here. Imports torch: ask only when asked to."""
    import torch

    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return torch.xpu.device_count() if torch.xpu.is_available() else 0
