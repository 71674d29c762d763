"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "duoka", "accelerate", "lightning", "pytorch-ignite", "safetensors")


@dataclass(frozen=True)
class Machine:
    """processor, gpus: as the system names them. memory: GiB. system: kernel and Python."""

    processor: str
    cores: int
    memory: int
    gpus: tuple[str, ...]
    system: str

    @property
    def name(self) -> str:
        """The name of its file of results: `intel-xeon-2-cores`, `nvidia-h200-x8`."""
        if self.gpus:
            return _plain(f"{self.gpus[0]} x{len(self.gpus)}")
        return _plain(f"{self.processor} {self.cores} cores")

    def __str__(self) -> str:
        cards = f", {len(self.gpus)} x {self.gpus[0]}" if self.gpus else ", no GPU"
        return f"{self.cores} cores of {self.processor}, {self.memory} GiB{cards}; {self.system}"


def this() -> Machine:
    """The machine that this runs on, with the cores that this process may use."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = re.sub(r"\((R|TM|r|tm)\)| CPU| Processor| @.*", "", found[1]) if found else platform.machine()
    return Machine(
        processor=" ".join(processor.split()),
        cores=len(os.sched_getaffinity(0)),
        memory=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    )


def versions() -> dict[str, str]:
    """Of the packages that are compared, as far as they are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _plain(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
