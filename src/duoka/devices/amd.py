"""Query AMD GPUs through amdsmi, which comes with ROCm.

Written from its documentation and tested with a fake library; not tested on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duoka.devices.gpu import Gpu
from duoka.system.time_limit import within

DRIVER = Path("/dev/kfd")  # exists if the AMD driver is loaded
NO_LIBRARY = "there is an AMD GPU (/dev/kfd), and the package amdsmi, which comes with ROCm, is missing"
MIB = 1 << 20
TIME_LIMIT = 30.0  # seconds


def ask() -> tuple[tuple[Gpu, ...], str]:
    """Return the AMD GPUs, or the reason why the driver could not be queried. Both are empty without a driver."""
    if not DRIVER.exists():
        return (), ""
    try:
        return within(TIME_LIMIT, _answer)
    except TimeoutError:
        return (), f"the AMD driver has not responded for {TIME_LIMIT:g} s; look in dmesg for the cause"


def _answer() -> tuple[tuple[Gpu, ...], str]:
    try:
        import amdsmi  # type: ignore[import-not-found]  # it comes with ROCm, not from PyPI
    except (ImportError, KeyError, OSError):  # it loads its library when imported
        return (), NO_LIBRARY
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as error:
        return (), f"the AMD driver does not answer ({error})"
    try:
        handles = amdsmi.amdsmi_get_processor_handles()
        return tuple(_gpu(amdsmi, handle, index) for index, handle in enumerate(handles)), ""
    except amdsmi.AmdSmiException as error:
        return (), f"the AMD driver reports an error ({error})"
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
        utilisation=_whole(ask("gpu_activity").get("gfx_activity")),
        power=_whole(power.get("current_socket_power") or power.get("average_socket_power")),
    )


def _whole(answer: Any) -> int | None:
    """Return a number; None for the library's "N/A"."""
    return answer if isinstance(answer, int) else None
