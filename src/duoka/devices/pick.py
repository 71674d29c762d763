"""Which cards are free, and which are the best: pure, from what was seen at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from duoka.devices.gpu import Gpu
from duoka.devices.spec import ONE_PART, Request
from duoka.errors import DeviceError, DevicesBusy

IDLE_MEMORY = 1 << 30  # what a driver and a desktop keep on a card that nobody computes on, in bytes
IDLE_SHARE = 0.02  # or this part of it, where that is more: a driver keeps more on a larger one
IDLE_UTILISATION = 5  # percent


def pick(request: Request, gpus: Sequence[Gpu]) -> tuple[list[Gpu], str]:
    """The cards for a request like `free:2` out of those that may be used, and why these.

    Raises:
        DeviceError: this machine will never have as many.
        DevicesBusy: they are in use now.
    """
    assert request.pick is not None
    assert request.count is not None
    able = fit_for(request, gpus)
    if len(able) < request.count:
        raise DeviceError(
            f"--devices {request}: {_count(request.count, 'is', 'are')} asked for; {_able(request, gpus)}"
        )
    reasons = {gpu: taken(gpu, request) for gpu in able}
    found = the_best([gpu for gpu in able if not reasons[gpu]])[: request.count]
    others = "; ".join(f"GPU {gpu.number}: {reason}" for gpu, reason in reasons.items() if reason)
    if len(found) < request.count:
        raise DevicesBusy(f"--devices {request}: {_count(len(found), 'is', 'are')} to be had now; {others}", others)
    found.sort(key=lambda gpu: gpu.place)
    chosen = ", ".join(f"GPU {gpu.number} ({_state(gpu)})" for gpu in found)
    return found, f"--devices {request} picked {chosen}{f'; not {others}' if others else ''}"


def fit_for(request: Request, gpus: Iterable[Gpu]) -> list[Gpu]:
    """Those that are large enough; parts of cards (MIG) only where one is asked for."""
    return [gpu for gpu in gpus if gpu.memory >= request.memory and (request.count == 1 or gpu.card is None)]


def the_best(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Sorted: those with the least work first, then those with the most free memory."""
    return sorted(gpus, key=_work)


def taken(gpu: Gpu, request: Request) -> str:
    """Why a card is not for this request now; empty if it is."""
    if gpu.holder is not None:
        return f"{gpu.holder.command} (pid {gpu.holder.pid}) has it"
    if gpu.awaited is not None:
        return f"{gpu.awaited.command} (pid {gpu.awaited.pid}) waits for it and came before"
    if request.pick != "best" and (user := user_of(gpu)):
        return user
    if gpu.free_memory < request.memory:
        return f"{gpu.free_memory / (1 << 30):.1f} GiB are free"
    return ""


def user_of(gpu: Gpu) -> str:
    """Who computes on a card, in words; empty if it is free.

    In a container the driver may name nobody: then memory and utilisation tell.
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
        whole = [gpu for gpu in gpus if gpu.card is None]
        parts = f"; {ONE_PART}" if len(whole) < len(gpus) else ""
        return f"{_count(len(whole), 'can', 'can')} be used here{parts}"
    sizes = ", ".join(f"GPU {gpu.number} {gpu.memory / (1 << 30):.1f} GiB" for gpu in gpus)
    return f"they have {sizes}"


def _count(count: int, one: str, many: str) -> str:
    return f"{count} GPU {one}" if count == 1 else f"{count or 'no'} GPUs {many}"
