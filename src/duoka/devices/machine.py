"""The machine that the devices are in: its processor and its memory, as the kernel tells them."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass

from duoka.devices import cgroup
from duoka.devices.inventory import cores


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. cores: how many this process may use. load: over 1, 5 and 15 minutes. memory, used: bytes."""

    host: str
    processor: str
    cores: int
    load: tuple[float, float, float]
    memory: int
    used: int


def read() -> Machine:
    """Look at this machine. A container's limit of memory counts as the machine's memory."""
    facts = _meminfo()
    total, used = facts.get("MemTotal", 0), facts.get("MemTotal", 0) - facts.get("MemAvailable", 0)
    limit, inside = cgroup.memory()
    if limit is not None and 0 < limit < total:
        total, used = limit, inside
    return Machine(os.uname().nodename, _processor(), cores(), os.getloadavg(), total, used)


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    with suppress(OSError), open("/proc/meminfo") as file:
        return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in file)}
    return {}


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
