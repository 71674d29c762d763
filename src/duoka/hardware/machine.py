"""The processor and memory of this machine, as the kernel reports them, and the limits of its control groups.

These are of a container, or of a Slurm job, by cgroup v2 or v1. Groups are nested; the tightest limit counts.
"""

from __future__ import annotations

import math
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine."""

    host: str
    processor: str
    cores: int  # available to this process
    load: tuple[float, float, float]  # over 1, 5 and 15 minutes
    memory: int  # bytes
    used: int


def read() -> Machine:
    """Query this machine. A container's memory limit counts as the machine's memory."""
    facts = _meminfo()
    total, used = facts.get("MemTotal", 0), facts.get("MemTotal", 0) - facts.get("MemAvailable", 0)
    limit, inside = memory_limit()
    if limit is not None and 0 < limit < total:
        total, used = limit, inside
    return Machine(os.uname().nodename, _processor(), cores(), os.getloadavg(), total, used)


def cores() -> int:
    """Return the number of cores this process may use, by CPU affinity and the container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS: all
    return max(1, math.ceil(min(allowed, allowed_cores())))  # a quota may be 1.5 cores


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


# Control groups.


def allowed_cores() -> float:
    """Return the number of cores allowed; infinite without a limit."""
    return min(map(_quota, _groups("cpu")))


def memory_limit() -> tuple[int | None, int]:
    """Return the memory limit and the memory in use, in bytes; the limit is None if there is none."""
    return min(filter(None, map(_memory, _groups("memory"))), default=(None, 0))


def _groups(controller: str) -> list[Path]:
    """Return the folders of this process's group and of its parents."""
    # Version 1 has a tree for each controller; version 2 one for all, of which the line names no controller.
    is_first_version = (ROOT / controller).is_dir()
    base = ROOT / controller if is_first_version else ROOT
    group = Path()
    with suppress(OSError, ValueError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") if is_first_version else not controllers:
                group = Path(path.lstrip("/"))
    if ".." in group.parts or not (base / group).is_dir():  # a container sees its own group as the root
        group = Path()
    return [base / group, *(base / around for around in group.parents)]


def _quota(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if limit != "max" and int(limit) > 0 else math.inf
    except (OSError, ValueError):
        return math.inf


def _memory(folder: Path) -> tuple[int, int] | None:
    """Return limit and use in bytes; page cache that the kernel can drop does not count as use."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # no such file, or "max"
            sizes = int((folder / limit).read_text()), int((folder / used).read_text())
            droppable = 0
            with suppress(OSError, ValueError):
                content = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
                # "total_": of version 1, where the other counts the group without those below it.
                droppable = int(content.get("total_inactive_file", content.get("inactive_file", "0")))
            return sizes[0], max(0, sizes[1] - droppable)
    return None
