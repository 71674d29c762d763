"""The processor and memory of this machine, as the kernel reports them."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass

from duoka.hardware import cgroup
from duoka.hardware.inventory import cores


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine. cores: available to this process. load: over 1, 5 and 15 minutes. memory, used: bytes."""

    host: str
    processor: str
    cores: int
    load: tuple[float, float, float]
    memory: int
    used: int


def read() -> Machine:
    """Query this machine. A container's memory limit counts as the machine's memory."""
    facts = _meminfo()
    total, used = facts.get("MemTotal", 0), facts.get("MemTotal", 0) - facts.get("MemAvailable", 0)
    limit, inside = cgroup.memory()
    if limit is not None and 0 < limit < total:
        total, used = limit, inside
    return Machine(os.uname().nodename, _processor(), cores(), os.getloadavg(), total, used)


def _meminfo() -> dict[str, int]:
    """Read /proc/meminfo in bytes; empty if there is none."""
    with suppress(OSError), open("/proc/meminfo") as file:
        return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in file)}
    return {}


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
