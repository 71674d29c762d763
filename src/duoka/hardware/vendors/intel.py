"""Intel: GPUs on the PCI bus; their memory and users are asked through xpu-smi, where it is installed.

Written from its documentation and tested with a fake; not tested on a GPU.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

from duoka.hardware.gpu import Gpu, GpuProcess
from duoka.hardware.vendors.report import MIB, Report, asked, on_bus, output, torch_is_built_for
from duoka.system.processes import describe

TYPE, TOOL, IN_AUTO, IS_SORTED = "xpu", "xpu-smi", True, False
VISIBLE: tuple[str, ...] = ("ZE_AFFINITY_MASK",)
ORDER = {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}
FAULT, ABSENT = "XPU error", "not compiled with XPU|No XPU devices"


def ask() -> Report:
    """Query all GPUs and their users."""
    # The GPU of a processor is not worth a word where torch cannot use it.
    return asked("Intel", _answer) if torch_is_built_for("xpu") else Report()


def _answer() -> Report:
    addresses = on_bus("0x8086")
    known: dict[str, Any] = {}
    processes: list[Any] | None = None
    if addresses and shutil.which(TOOL):
        try:
            known = {device["pci_bdf_address"]: device for device in _json("discovery")["device_list"]}
            processes = _json("ps").get("device_util_by_proc_list", [])
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Report(why_none=f"the Intel driver does not answer ({error})")
    return Report(tuple(_gpu(index, at, known.get(at, {}), processes) for index, at in enumerate(addresses)))


def _gpu(index: int, address: str, device: dict[str, Any], processes: list[Any] | None) -> Gpu:
    number = device.get("device_id")
    more, figures = {}, {}
    if number is not None:
        more = _json("discovery", "-d", str(number))
        figures = {
            figure["metrics_type"]: figure["value"] for figure in _json("stats", "-d", str(number))["device_level"]
        }
    used = figures.get("XPUM_STATS_MEMORY_USED")
    busy, power = figures.get("XPUM_STATS_GPU_UTILIZATION"), figures.get("XPUM_STATS_POWER")
    users = [user for user in processes or () if user.get("device_id") == number]
    return Gpu(
        index,
        f"INTEL-{device.get('uuid') or address}",
        device.get("device_name", "Intel GPU"),
        int(more.get("memory_physical_size_byte", 0)),
        None if used is None else int(used * MIB),
        utilisation=None if busy is None else int(busy),
        power=None if power is None else float(power),
        processes=None
        if processes is None
        else tuple(GpuProcess(user["process_id"], "compute", None, *describe(user["process_id"])) for user in users),
    )


def _json(*words: str) -> Any:
    return json.loads(output(TOOL, *words, "-j"))
