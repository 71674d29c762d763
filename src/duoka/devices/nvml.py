"""What the NVIDIA driver answers. The only file that asks it, through nvidia-ml-py.

A driver that is old, a card that fails in the middle, a container that may not ask: each costs the answer that
it cannot give, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from duoka.devices.gpu import Gpu, Process
from duoka.devices.processes import describe

NO_LIBRARY = "GPUs are found through the package nvidia-ml-py, which is missing"
NVLINKS = 18  # the most that a card has


@dataclass(frozen=True, slots=True)
class Answer:
    """What the driver says of this machine. why_none: why there are no GPUs; empty where there are some."""

    gpus: tuple[Gpu, ...] = ()
    why_none: str = ""
    driver: str = ""
    cuda: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """How two GPUs reach each other. nvlinks: how many are up. direct: whether one reads the other's memory."""

    first: int
    second: int
    direct: bool | None
    nvlinks: int


@dataclass(slots=True)
class _Questions:
    """Asks one card. What it cannot answer is None; what is wrong with the card itself is kept in `problem`."""

    nvml: Any
    problem: str = field(default="")

    def ask(self, name: str, *args: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)  # an old nvidia-ml-py may lack it
        try:
            return None if function is None else function(*args)
        except (self.nvml.NVMLError_NotSupported, self.nvml.NVMLError_FunctionNotFound):
            return None
        except (self.nvml.NVMLError_NoPermission, self.nvml.NVMLError_InvalidArgument, self.nvml.NVMLError_NotFound):
            return None
        except self.nvml.NVMLError as error:
            self.problem = self.problem or str(error)
            return None


def ask() -> Answer:
    """Ask for all cards and who uses them. Takes milliseconds for each card, and does not start CUDA."""
    try:
        import pynvml
    except ImportError:
        return Answer(why_none=NO_LIBRARY)
    try:
        with _driver(pynvml):
            gpus = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
            system = _Questions(pynvml)
            driver = _text(system.ask("nvmlSystemGetDriverVersion"))
            cuda = system.ask("nvmlSystemGetCudaDriverVersion_v2") or system.ask("nvmlSystemGetCudaDriverVersion")
            why_none = "" if gpus else "the NVIDIA driver sees no GPU"
            return Answer(gpus, why_none, driver, f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "")
    except _NoDriver as error:
        return Answer(why_none=f"no NVIDIA driver answers here ({error})")
    except pynvml.NVMLError as error:
        return Answer(why_none=f"the NVIDIA driver reports an error ({error})")


def links() -> list[Link]:
    """How each two of the cards reach each other; empty without the driver."""
    try:
        import pynvml

        with _driver(pynvml):
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            pairs = [(first, second) for first in range(len(handles)) for second in range(first)]
            return [_link(pynvml, handles, second, first) for first, second in pairs]
    except (ImportError, _NoDriver):
        return []
    except pynvml.NVMLError:
        return []


class _NoDriver(Exception):
    """The driver did not come up."""


@contextmanager
def _driver(nvml: Any) -> Iterator[None]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _NoDriver(str(error)) from None
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    questions = _Questions(nvml)
    handle = questions.ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(index, "", "GPU", 0, problem=questions.problem or "the driver does not let this user see it")
    mode = questions.ask("nvmlDeviceGetMigMode", handle)
    split = bool(mode and mode[0])
    return _one(questions, handle, index, split=split, parts=_parts(nvml, questions, handle) if split else ())


def _one(questions: _Questions, handle: Any, index: int, split: bool = False, parts: tuple[Gpu, ...] = ()) -> Gpu:
    ask, nvml = questions.ask, questions.nvml
    memory = ask("nvmlDeviceGetMemoryInfo", handle)  # none of its own where it shares the processor's
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
        power=None if power is None else power / 1000,
        power_limit=None if limit is None else limit / 1000,
        processes=_processes(questions, handle),
        is_split=split,
        parts=parts,
        problem=questions.problem,
    )


def _parts(nvml: Any, questions: _Questions, handle: Any) -> tuple[Gpu, ...]:
    """The parts of a card that is split; places without one answer that there is nothing."""
    places = range(questions.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    handles = [(place, questions.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)) for place in places]
    return tuple(_one(_Questions(nvml), part, place) for place, part in handles if part is not None)


def _processes(questions: _Questions, handle: Any) -> tuple[Process, ...] | None:
    compute = _running(questions, "Compute", handle)
    graphics = _running(questions, "Graphics", handle) or []
    if compute is None:
        return None
    seen = {one.pid for one in compute}
    found = [(one, "compute") for one in compute] + [(one, "graphics") for one in graphics if one.pid not in seen]
    return tuple(
        Process(one.pid, kind, one.usedGpuMemory, *describe(one.pid))  # type: ignore[arg-type]  # one of two words
        for one, kind in found
    )


def _running(questions: _Questions, kind: str, handle: Any) -> list[Any] | None:
    """The newest form of the question that the driver knows."""
    for version in ("", "_v2"):
        found: list[Any] | None = questions.ask(f"nvmlDeviceGet{kind}RunningProcesses{version}", handle)
        if found is not None:
            return found
    return None


def _link(nvml: Any, handles: list[Any], first: int, second: int) -> Link:
    ask = _Questions(nvml).ask
    status = ask("nvmlDeviceGetP2PStatus", handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_READ)
    direct = None if status is None else status == nvml.NVML_P2P_STATUS_OK
    ends = [
        [ask("nvmlDeviceGetNvLinkState", handles[one], link) for link in range(NVLINKS)] for one in (first, second)
    ]
    return Link(first, second, direct, min(sum(state == nvml.NVML_FEATURE_ENABLED for state in end) for end in ends))


def _text(answer: Any) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer or ""
