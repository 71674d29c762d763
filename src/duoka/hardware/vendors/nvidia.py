"""NVIDIA: GPUs, asked through nvidia-ml-py. No other module does.

A query that an old driver, a failing GPU or a container does not answer leaves only its own value unknown. A driver
that does not return costs the time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from duoka.hardware.gpu import Gpu, GpuProcess
from duoka.hardware.vendors import report
from duoka.hardware.vendors.report import Report, asked
from duoka.system.processes import describe
from duoka.system.time_limit import within

TYPE, TOOL, IN_AUTO, IS_SORTED = "cuda", "nvidia-smi", True, False
VISIBLE: tuple[str, ...] = ("CUDA_VISIBLE_DEVICES",)
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
FAULT = "CUDA error"
ABSENT = "(?:have NCCL built in|NCCL is only supported|not compiled with CUDA|No CUDA GPUs|no NVIDIA driver)"
NO_LIBRARY = "GPUs are found through the package nvidia-ml-py, which is missing"
NVLINKS = 18  # maximum of one GPU
ESSENTIAL = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo")
UNANSWERED = (
    "NVMLError_NotSupported",
    "NVMLError_FunctionNotFound",
    "NVMLError_NoPermission",
    "NVMLError_InvalidArgument",
    "NVMLError_NotFound",
    "NVMLLibraryMismatchError",  # the driver is older than nvidia-ml-py; not a subclass of NVMLError
)


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of two GPUs."""

    first: int
    second: int
    direct: bool | None  # one can access the other's memory
    nvlinks: int  # number that are up


@dataclass(slots=True)
class _Queries:
    """Queries one GPU. Unsupported queries return None; a fault of the GPU itself is stored in `problem`."""

    nvml: Any
    problem: str = field(default="")

    def ask(self, name: str, *args: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)  # an old nvidia-ml-py may lack it
        try:
            return None if function is None else function(*args)
        except (self.nvml.NVMLError_GpuIsLost, self.nvml.NVMLError_ResetRequired) as error:
            self.problem = self.problem or str(error)
        except tuple(getattr(self.nvml, kind) for kind in UNANSWERED if hasattr(self.nvml, kind)):
            pass
        except self.nvml.NVMLError as error:
            if name in ESSENTIAL:  # a broken fan or sensor does not prevent computing
                self.problem = self.problem or str(error)
        return None


def ask() -> Report:
    """Query all GPUs and their users. Takes milliseconds for each GPU, and does not start CUDA."""
    try:
        import pynvml
    except ImportError:
        return Report(why_none=NO_LIBRARY)
    return asked("NVIDIA", lambda: _answer(pynvml))


def _answer(pynvml: Any) -> Report:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Report(why_none=f"no NVIDIA driver answers here ({error})")
    try:
        gpus = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        system = _Queries(pynvml)
        driver = _text(system.ask("nvmlSystemGetDriverVersion"))
        cuda = system.ask("nvmlSystemGetCudaDriverVersion_v2") or system.ask("nvmlSystemGetCudaDriverVersion")
        why_none = "" if gpus else "the NVIDIA driver sees no GPU"
        versions = {"driver": driver, "CUDA": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""}
        return Report(gpus, why_none, versions)
    except pynvml.NVMLError as error:
        return Report(why_none=f"the NVIDIA driver reports an error ({error})")
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def links() -> list[Link]:
    """Return the connection of each pair of GPUs; empty without a driver. GPUs that fail are left out."""
    try:
        import pynvml
    except ImportError:
        return []
    with suppress(TimeoutError, pynvml.NVMLError):
        return within(report.TIME_LIMIT, lambda: _links(pynvml))
    return []


def _links(nvml: Any) -> list[Link]:
    nvml.nvmlInit()
    try:
        ask = _Queries(nvml).ask
        handles = {index: ask("nvmlDeviceGetHandleByIndex", index) for index in range(nvml.nvmlDeviceGetCount())}
        there = {index: handle for index, handle in handles.items() if handle is not None}
        return [_link(nvml, there, first, second) for first, second in combinations(there, 2)]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    queries = _Queries(nvml)
    handle = queries.ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(index, "", "GPU", 0, problem=queries.problem or "the driver does not let this user see it")
    mode = queries.ask("nvmlDeviceGetMigMode", handle)  # now, and after the next reset
    card = _unit(queries, handle, index)
    if not (mode and mode[0]):
        return card
    return replace(card, is_split=True, parts=tuple(_parts(queries, handle, index)))


def _unit(queries: _Queries, handle: Any, index: int) -> Gpu:
    ask, nvml = queries.ask, queries.nvml
    memory = ask("nvmlDeviceGetMemoryInfo", handle)  # not supported on GPUs that share the CPU's memory
    busy = ask("nvmlDeviceGetUtilizationRates", handle)
    power, limit = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    return Gpu(
        index=index,
        uuid=_text(ask("nvmlDeviceGetUUID", handle)),
        name=_text(ask("nvmlDeviceGetName", handle)) or "GPU",
        memory=int(memory.total) if memory else 0,
        used=int(memory.used) if memory else None,
        utilisation=int(busy.gpu) if busy else None,
        temperature=ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        power=None if power is None else power / 1000,  # of milliwatts
        power_limit=None if limit is None else limit / 1000,
        capability=".".join(map(str, ask("nvmlDeviceGetCudaComputeCapability", handle) or ())),
        processes=_processes(queries, handle),
        problem=queries.problem,
        speed=(ask("nvmlDeviceGetNumGpuCores", handle) or 0)
        * (ask("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM) or 0),
    )


def _parts(queries: _Queries, handle: Any, card: int) -> Iterator[Gpu]:
    """Yield the parts of a split GPU; an unused slot answers NotFound."""
    for slot in range(queries.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        part = queries.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
        if part is not None:
            of_part = _Queries(queries.nvml)
            gpu = replace(_unit(of_part, part, slot), card=card)
            number = of_part.ask("nvmlDeviceGetGpuInstanceId", part)
            if gpu.processes is None and number is not None:  # some drivers report processes of whole GPUs only
                gpu = replace(gpu, processes=_processes(queries, handle, number))
            yield gpu


def _processes(queries: _Queries, handle: Any, part: int | None = None) -> tuple[GpuProcess, ...] | None:
    """Return the processes on a GPU, or only those in one part of it."""
    compute = _running(queries, "Compute", handle)
    graphics = _running(queries, "Graphics", handle) or []
    if compute is None:
        return None
    seen = {user.pid for user in compute}  # a process may compute and draw
    users = [(user, "compute") for user in compute] + [
        (user, "graphics") for user in graphics if user.pid not in seen
    ]
    return tuple(
        GpuProcess(user.pid, kind, user.usedGpuMemory, *describe(user.pid))  # type: ignore[arg-type]  # one of two words
        for user, kind in users
        if part is None or user.gpuInstanceId == part
    )


def _running(queries: _Queries, kind: str, handle: Any) -> list[Any] | None:
    """Call the newest version of the query that both the driver and nvidia-ml-py support."""
    for version in ("_v3", "_v2", ""):
        processes: list[Any] | None = queries.ask(f"nvmlDeviceGet{kind}RunningProcesses{version}", handle)
        if processes is not None:
            return processes
    return None


def _link(nvml: Any, handles: Mapping[int, Any], first: int, second: int) -> Link:
    ask = _Queries(nvml).ask
    status = ask("nvmlDeviceGetP2PStatus", handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_READ)
    direct = None if status is None else status == nvml.NVML_P2P_STATUS_OK
    ends = [
        [ask("nvmlDeviceGetNvLinkState", handles[end], link) for link in range(NVLINKS)] for end in (first, second)
    ]
    return Link(first, second, direct, min(sum(state == nvml.NVML_FEATURE_ENABLED for state in end) for end in ends))


def _text(answer: Any) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer or ""
