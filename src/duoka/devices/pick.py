"""Find free GPUs and order them by preference; pure functions of an inventory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from duoka.devices.gpu import Gpu
from duoka.devices.spec import ONE_PART, Request
from duoka.errors import DeviceError, DevicesBusy

IDLE_MEMORY = 1 << 30  # bytes that a driver and a desktop use on an idle GPU
IDLE_SHARE = 0.02  # or this fraction, if that is more: a driver uses more on a larger GPU
IDLE_UTILISATION = 5  # percent


def pick(request: Request, gpus: Sequence[Gpu]) -> tuple[list[Gpu], str]:
    """Pick the GPUs for a request like `free:2` among the allowed ones, and say why.

    Raises:
        DeviceError: this machine does not have as many.
        DevicesBusy: they are in use now.
    """
    assert request.pick is not None
    assert request.count is not None
    able = large_enough(request, gpus)
    if len(able) < request.count:
        raise DeviceError(
            f"--devices {request}: {_count(request.count, 'is', 'are')} asked for; {_able(request, gpus)}"
        )
    reasons = {gpu: why_unavailable(gpu, request) for gpu in able}
    picked = by_preference([gpu for gpu in able if not reasons[gpu]])[: request.count]
    others = "; ".join(f"GPU {gpu.number}: {reason}" for gpu, reason in reasons.items() if reason)
    if len(picked) < request.count:
        raise DevicesBusy(f"--devices {request}: {_count(len(picked), 'is', 'are')} available now; {others}", others)
    picked.sort(key=lambda gpu: gpu.place)
    chosen = ", ".join(f"GPU {gpu.number} ({_state(gpu)})" for gpu in picked)
    return picked, f"--devices {request} picked {chosen}{f'; not {others}' if others else ''}"


def large_enough(request: Request, gpus: Iterable[Gpu]) -> list[Gpu]:
    """Select GPUs with enough memory; parts (MIG) only if one device is requested."""
    return [gpu for gpu in gpus if gpu.memory >= request.memory and (request.count == 1 or gpu.card is None)]


def by_preference(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Sort by least work, then most free memory."""
    return sorted(gpus, key=_work)


def why_unavailable(gpu: Gpu, request: Request) -> str:
    """Return why a GPU is not available for this request now; empty if it is."""
    if gpu.holder is not None:
        return f"{gpu.holder.command} (pid {gpu.holder.pid}) has locked it"
    if gpu.awaited is not None:
        return f"{gpu.awaited.command} (pid {gpu.awaited.pid}) is ahead in the queue for it"
    if request.pick != "best" and (user := user_of(gpu)):
        return user
    if gpu.free_memory < request.memory:
        return f"{gpu.free_memory / (1 << 30):.1f} GiB are free"
    return ""


def user_of(gpu: Gpu) -> str:
    """Describe who uses a GPU; empty if it is free.

    In a container the driver may not report processes; then memory and utilisation decide.
    """
    if computing := list(_computing(gpu)):
        return ", ".join(computing)
    if gpu.used is not None and gpu.used > max(IDLE_MEMORY, IDLE_SHARE * gpu.memory):
        return f"{gpu.used / (1 << 30):.1f} GiB are in use by processes that cannot be seen from here"
    if gpu.utilisation is not None and gpu.utilisation > IDLE_UTILISATION:
        return f"{gpu.utilisation}% busy by processes that cannot be seen from here"
    return ""


def _computing(gpu: Gpu) -> Iterator[str]:
    for process in gpu.processes or ():
        if process.kind == "compute":
            who = f"{process.user} " if process.user else ""
            command = f" {process.command[:60]}" if process.command else ""
            yield f"{who}pid {process.pid}{command}"


def _work(gpu: Gpu) -> tuple[int, int, int, tuple[int, int]]:
    computing = sum(process.kind == "compute" for process in gpu.processes or ())
    return computing, gpu.utilisation or 0, -gpu.free_memory, gpu.place


def _state(gpu: Gpu) -> str:
    busy = "" if gpu.utilisation is None else f"{gpu.utilisation}% busy, "
    return f"{busy}{gpu.free_memory / (1 << 30):.1f} GiB free"


def _able(request: Request, gpus: Sequence[Gpu]) -> str:
    if not request.memory:
        cards = [gpu for gpu in gpus if gpu.card is None]
        parts = f"; {ONE_PART}" if len(cards) < len(gpus) else ""
        return f"{_count(len(cards), 'can', 'can')} be used here{parts}"
    sizes = ", ".join(f"GPU {gpu.number} {gpu.memory / (1 << 30):.1f} GiB" for gpu in gpus)
    return f"they have {sizes}"


def _count(count: int, singular: str, plural: str) -> str:
    return f"{count} GPU {singular}" if count == 1 else f"{count or 'no'} GPUs {plural}"
