"""AMD: GPUs, asked through amdsmi, which comes with ROCm. torch calls them cuda.

Written from its documentation and tested with a fake library; not tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duoka.hardware.gpu import Gpu, GpuProcess
from duoka.hardware.vendors.report import MIB, Report, asked, torch_is_built_for
from duoka.system.processes import describe

DRIVER = Path("/dev/kfd")  # exists if the AMD driver is loaded
NO_LIBRARY = "there is an AMD GPU (/dev/kfd), and the package amdsmi, which comes with ROCm, is missing"
TYPE, TOOL, IN_AUTO, IS_SORTED = "cuda", "amd-smi", True, False
VISIBLE: tuple[str, ...] = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
ORDER: dict[str, str] = {}
FAULT, ABSENT = "HIP error", "No HIP GPUs"


def ask() -> Report:
    """Query all GPUs and their users."""
    return asked("AMD", _answer) if DRIVER.exists() else Report()


def _answer() -> Report:
    try:
        import amdsmi  # type: ignore[import-not-found]  # it comes with ROCm, not from PyPI
    except (ImportError, KeyError, OSError):  # it loads its library when imported
        return Report(why_none=NO_LIBRARY)
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as error:
        return Report(why_none=f"the AMD driver does not answer ({error})")
    try:
        handles = amdsmi.amdsmi_get_processor_handles()
        gpus = tuple(_gpu(amdsmi, handle, index) for index, handle in enumerate(handles))
        return Report(gpus, lacking="" if torch_is_built_for("hip") else "torch here is not built for ROCm")
    except amdsmi.AmdSmiException as error:
        return Report(why_none=f"the AMD driver reports an error ({error})")
    finally:
        amdsmi.amdsmi_shut_down()


def _gpu(smi: Any, handle: Any, index: int) -> Gpu:
    def ask(name: str) -> Mapping[str, Any]:
        try:
            answer: Mapping[str, Any] = getattr(smi, f"amdsmi_get_{name}")(handle)
            return answer
        except (smi.AmdSmiException, AttributeError):
            return {}

    memory, power = ask("gpu_vram_usage"), ask("power_info")
    try:
        running = [(int(user["pid"]), user.get("mem")) for user in smi.amdsmi_get_gpu_process_list(handle)]
    except (smi.AmdSmiException, AttributeError, KeyError, TypeError):
        running = None
    try:
        uuid = str(smi.amdsmi_get_gpu_device_uuid(handle))
    except smi.AmdSmiException:
        uuid = ""
    used = memory.get("vram_used")
    return Gpu(
        index=index,
        uuid=uuid,
        name=str(ask("gpu_asic_info").get("market_name", "AMD GPU")),
        memory=int(memory.get("vram_total", 0)) * MIB,
        used=None if used is None else int(used) * MIB,
        utilisation=_number(ask("gpu_activity").get("gfx_activity")),
        processes=None
        if running is None
        else tuple(GpuProcess(pid, "compute", used, *describe(pid)) for pid, used in running),
        power=_number(power.get("current_socket_power") or power.get("average_socket_power")),
    )


def _number(answer: Any) -> int | None:
    """Return a number; None for the library's "N/A"."""
    return answer if isinstance(answer, int) else None
