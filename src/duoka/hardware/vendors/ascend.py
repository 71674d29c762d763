"""Huawei Ascend: NPUs, asked through npu-smi, which comes with the driver; torch gets them by torch_npu.

Written from its output as people publish it, and tested with that; not tested on an NPU.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from duoka.hardware.gpu import Gpu, GpuProcess
from duoka.hardware.vendors.report import MIB, Report, asked, output
from duoka.system.processes import describe

TYPE, TOOL, IN_AUTO = "npu", "npu-smi", True
IS_SORTED = True  # in another order the runtime sees none
VISIBLE: tuple[str, ...] = ("ASCEND_RT_VISIBLE_DEVICES",)
ORDER: dict[str, str] = {}
FAULT, ABSENT = "NPU (?:function )?error", "No NPU"
DRIVER = Path("/dev/davinci_manager")  # exists if the driver is loaded


def ask() -> Report:
    """Query all NPUs and their users."""
    return asked("Ascend", _answer) if DRIVER.exists() else Report()


def _answer() -> Report:
    try:
        numbers, table = output(TOOL, "info", "-m"), output(TOOL, "info")
    except OSError as error:
        return Report(why_none=f"the Ascend driver does not answer ({error})")
    # | NPU ID | Chip ID | Chip Logic ID | Chip Name |; other chips than NPUs have no logic number
    chips = {
        (npu, chip): int(index) for npu, chip, index in re.findall(r"^\s*(\d+)\s+(\d+)\s+(\d+)\s", numbers, re.M)
    }
    version = re.search(r"Version:\s*(\S+)", table)
    gpus = sorted(_npus(table, chips), key=lambda gpu: gpu.index)
    lacking = "" if importlib.util.find_spec("torch_npu") else "the package torch_npu is missing"
    versions = {"driver": version[1] if version else ""}
    return Report(tuple(gpus), "" if gpus else "npu-smi lists no NPU", versions, lacking)


def _npus(table: str, chips: dict[tuple[str, str], int]) -> Iterator[Gpu]:
    """Parse the table of `npu-smi info`: a row for each card, then one for each of its chips; then the processes."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if line[:1] == "|"]
    users: dict[tuple[str, ...], list[GpuProcess]] = {}
    for chip, pid, _, memory in (cells for cells in rows if len(cells) == 4 and cells[1].isdigit()):
        used = int(memory) * MIB if memory.isdigit() else None
        users.setdefault(tuple(chip.split()), []).append(GpuProcess(int(pid), "compute", used, *describe(int(pid))))
    npu, name, health, power, heat = "", "", "", "", ""
    for cells in rows:
        first = cells[0].split()
        if len(cells) == 3 and len(first) == 2 and first[0].isdigit():
            (npu, name), health, (power, heat) = first, cells[1], cells[2].split()[:2]
        elif len(cells) == 3 and (npu, cells[0]) in chips:
            taken, size = re.findall(r"(\d+)\s*/\s*(\d+)", cells[2])[-1]
            busy = cells[2].split()[0]
            yield Gpu(
                chips[npu, cells[0]],
                f"NPU-{cells[1]}",
                f"Ascend {name}",
                int(size) * MIB,
                int(taken) * MIB,
                utilisation=int(busy) if busy.isdigit() else None,
                temperature=int(heat) if heat.isdigit() else None,
                power=float(power) if re.fullmatch(r"[0-9.]+", power) else None,
                processes=tuple(users.get((npu, cells[0]), ())),
                problem="" if health in ("OK", "Warning") else f"npu-smi says {health}",
            )
