"""What the NVIDIA driver answers. The only file that asks it, through nvidia-ml-py.

A driver that is old, a card that fails in the middle, a container that may not ask: each costs the answer that
it cannot give, and nothing else. A driver that never comes back costs the time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from duoka.devices.gpu import Gpu, Process
from duoka.devices.processes import describe
from duoka.patience import within

PATIENCE = 30.0  # seconds; a driver that nobody keeps awake takes one or two to wake each card
NO_LIBRARY = "GPUs are found through the package nvidia-ml-py, which is missing"
NVLINKS = 18  # the most that a card has
ESSENTIAL = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo")
UNANSWERED = (
    "NVMLError_NotSupported",
    "NVMLError_FunctionNotFound",
    "NVMLError_NoPermission",
    "NVMLError_InvalidArgument",
    "NVMLError_NotFound",
    "NVMLLibraryMismatchError",  # the driver is older than nvidia-ml-py; it is no NVMLError
)


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
        except (self.nvml.NVMLError_GpuIsLost, self.nvml.NVMLError_ResetRequired) as error:
            self.problem = self.problem or str(error)
        except tuple(getattr(self.nvml, kind) for kind in UNANSWERED if hasattr(self.nvml, kind)):
            pass
        except self.nvml.NVMLError as error:
            if name in ESSENTIAL:  # a card whose fan or meter is broken computes all the same
                self.problem = self.problem or str(error)
        return None


def ask() -> Answer:
    """Ask for all cards and who uses them. Takes milliseconds for each card, and does not start CUDA."""
    try:
        import pynvml
    except ImportError:
        return Answer(why_none=NO_LIBRARY)
    try:
        return within(PATIENCE, lambda: _answer(pynvml))
    except TimeoutError:
        return Answer(why_none=f"the NVIDIA driver has not answered for {PATIENCE:g} s; dmesg may tell why")


def _answer(pynvml: Any) -> Answer:
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
    """How each two of the cards reach each other; empty without a driver. Cards that fail are left out."""
    try:
        import pynvml

        return within(PATIENCE, lambda: _links(pynvml))
    except (ImportError, TimeoutError, _NoDriver):
        return []
    except pynvml.NVMLError:
        return []


def _links(nvml: Any) -> list[Link]:
    with _driver(nvml):
        ask = _Questions(nvml).ask
        handles = {index: ask("nvmlDeviceGetHandleByIndex", index) for index in range(nvml.nvmlDeviceGetCount())}
        there = {index: handle for index, handle in handles.items() if handle is not None}
        return [_link(nvml, there, first, second) for first, second in combinations(there, 2)]


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
    card = _one(questions, handle, index)
    if not (mode and mode[0]):
        return card
    return replace(card, is_split=True, parts=tuple(_parts(questions, handle, index)))


def _one(questions: _Questions, handle: Any, index: int) -> Gpu:
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
        capability=_capability(ask("nvmlDeviceGetCudaComputeCapability", handle)),
        processes=_processes(questions, handle),
        problem=questions.problem,
    )


def _capability(answer: tuple[int, int] | None) -> str:
    return f"{answer[0]}.{answer[1]}" if answer else ""


def _parts(questions: _Questions, handle: Any, card: int) -> Iterator[Gpu]:
    """The parts of a card that is split; places without one answer that there is nothing."""
    places = range(questions.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)
    for place in places:
        part = questions.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
        if part is not None:
            own = _Questions(questions.nvml)
            found = replace(_one(own, part, place), card=card)
            number = own.ask("nvmlDeviceGetGpuInstanceId", part)
            if found.processes is None and number is not None:  # some drivers answer for whole cards only
                found = replace(found, processes=_processes(questions, handle, number))
            yield found


def _processes(questions: _Questions, handle: Any, part: int | None = None) -> tuple[Process, ...] | None:
    """Who uses a card; of a card that is split, only those in one part, if it is given."""
    compute = _running(questions, "Compute", handle)
    graphics = _running(questions, "Graphics", handle) or []
    if compute is None:
        return None
    seen = {one.pid for one in compute}
    found = [(one, "compute") for one in compute] + [(one, "graphics") for one in graphics if one.pid not in seen]
    return tuple(
        Process(one.pid, kind, one.usedGpuMemory, *describe(one.pid))  # type: ignore[arg-type]  # one of two words
        for one, kind in found
        if part is None or one.gpuInstanceId == part
    )


def _running(questions: _Questions, kind: str, handle: Any) -> list[Any] | None:
    """The newest form of the question that both the driver and nvidia-ml-py know."""
    for version in ("_v3", "_v2", ""):
        found: list[Any] | None = questions.ask(f"nvmlDeviceGet{kind}RunningProcesses{version}", handle)
        if found is not None:
            return found
    return None


def _link(nvml: Any, handles: Mapping[int, Any], first: int, second: int) -> Link:
    ask = _Questions(nvml).ask
    status = ask("nvmlDeviceGetP2PStatus", handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_READ)
    direct = None if status is None else status == nvml.NVML_P2P_STATUS_OK
    ends = [
        [ask("nvmlDeviceGetNvLinkState", handles[one], link) for link in range(NVLINKS)] for one in (first, second)
    ]
    return Link(first, second, direct, min(sum(state == nvml.NVML_FEATURE_ENABLED for state in end) for end in ends))


def _text(answer: Any) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer or ""
