"""Choose devices for a request: those named, those that the variable allows, or those that are free.

Pure functions of an inventory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from duoka.errors import DeviceError, DevicesBusy
from duoka.hardware import machine
from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.inventory import Inventory, units
from duoka.hardware.spec import ONE_PART, Request
from duoka.system.messages import listed

IDLE_MEMORY = 1 << 30  # bytes that a driver and a desktop use on an idle GPU
IDLE_SHARE = 0.02  # or this fraction, if that is more: a driver uses more on a larger GPU
IDLE_UTILISATION = 5  # percent


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen devices in the order of ranks, and notes for the user."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()


def choose(request: Request, inventory: Inventory) -> Choice:
    """Choose the devices for a request; of the inventory's GPUs only those that its variable names, in that order.

    Raises DeviceError if a device does not exist or is hidden, or there are too few; DevicesBusy if there are enough,
    but others use them.
    """
    if request.type == "cpu":
        return Choice(_cpus(request.count))
    kind = inventory.vendor_module.TYPE
    if request.type not in ("auto", "gpu", kind):
        raise DeviceError(f"--devices {request}: this machine has no {request.type} device; use auto or cpu")
    allowed, notes = allowed_gpus(inventory)
    if request.type == "auto":
        notes += (inventory.why_others,) * bool(inventory.why_others)
        if not allowed:  # a count means CPU workers where there is no GPU
            return Choice(_cpus(request.count), notes)
    gpus, why = _gpus_for(request, allowed, inventory)
    notes += why
    if inventory.vendor_module.IS_SORTED:  # as the runtime numbers them, whatever the order in its variable
        gpus = sorted(gpus, key=lambda gpu: gpu.index)
    if inventory.visible is not None:
        mapping = ", ".join(f"{kind}:{index} = GPU {gpu.number}" for index, gpu in enumerate(gpus))
        notes = (*notes, f"{_setting(inventory)} respected: {mapping}")
    devices = [
        Device(kind, gpu.index, gpu.name, gpu.uuid)
        if gpu.card is None
        else Device(kind, gpu.card, gpu.name, gpu.uuid, gpu.index)
        for gpu in gpus
    ]
    return Choice(tuple(devices), notes)


def _cpus(count: int | None) -> tuple[Device, ...]:
    return (Device("cpu"),) * (count or 1)


def _gpus_for(request: Request, allowed: tuple[Gpu, ...], inventory: Inventory) -> tuple[list[Gpu], tuple[str, ...]]:
    """Return the requested GPUs among the allowed ones, and notes on why they were picked."""
    if not allowed:  # hidden by the variable, or there are none
        why = f"{_setting(inventory)} hides all GPUs" if inventory.gpus else inventory.no_gpus
        raise DeviceError(f"--devices {request}: {why}; use auto or cpu")
    if request.pick:
        gpus, why = pick(request, [gpu for gpu in units(allowed) if not gpu.problem])
        return gpus, (why,)
    if request.indices or request.uuids:
        return _gpus_named(request, allowed, inventory), ()
    usable = [gpu for gpu in allowed if not (gpu.problem or gpu.is_split)]
    parts = [part for part in units(allowed) if part.card is not None and not part.problem]
    split = "it is split into parts (MIG), of which a run can use one"
    unusable = {gpu.number: gpu.problem or split for gpu in allowed if gpu.problem or gpu.is_split}
    left_out = tuple(f"GPU {number} is left out: {why}" for number, why in unusable.items())
    if not usable and parts and request.count in (None, 1):  # where there are whole GPUs, too, parts must be named
        rest = " of several; --devices free:1 takes one that nobody uses" if len(parts) > 1 else ""
        return parts[:1], (f"GPU {parts[0].number} is a part (MIG){rest}",)
    if (request.count is not None and request.count > len(usable)) or not usable:
        asked = "GPUs are" if request.count is None else f"{request.count} GPUs are"
        ill = f"; {'; '.join(left_out)}" if left_out else ""
        raise DeviceError(f"--devices {request}: {asked} asked for; {_allowed_text(allowed, inventory)}{ill}")
    return usable[: request.count], left_out


def _gpus_named(request: Request, allowed: tuple[Gpu, ...], inventory: Inventory) -> list[Gpu]:
    """Return the GPUs of a list of numbers or UUIDs."""
    gpus: list[Gpu] = []
    named = dict.fromkeys((*allowed, *units(allowed)))  # whole GPUs are in both
    for name in request.uuids or map(str, request.indices):
        called, matching = name if request.uuids else f"GPU {name}", _matching(name, named)
        if not matching:
            raise DeviceError(f"--devices {request}: {called} cannot be used; {_allowed_text(allowed, inventory)}")
        if len(matching) > 1 or matching[0] in gpus:
            raise DeviceError(f"--devices {request}: {called} does not name one GPU; write more of its UUID")
        if matching[0].problem:
            raise DeviceError(f"--devices {request}: {called} cannot be used: {matching[0].problem}")
        if matching[0].is_split:
            parts = ", ".join(part.uuid for part in matching[0].parts) or "it has none yet"
            raise DeviceError(f"--devices {request}: {called} is split (MIG); name one of its parts: {parts}")
        gpus += matching
    return gpus


def _allowed_text(allowed: tuple[Gpu, ...], inventory: Inventory) -> str:
    may = f"{_setting(inventory)} allows" if inventory.visible is not None else "this machine has"
    numbers = [gpu.number for gpu in sorted(allowed, key=lambda gpu: gpu.order)]
    return f"{may} {listed('GPU', numbers)} (numbers as in {inventory.vendor_module.TOOL})"


def allowed_gpus(inventory: Inventory) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that the variable allows, in its order, and a note on an entry that names none.

    As for the runtime, the first entry that names no GPU of this machine ends the list.
    """
    gpus, visible = inventory.gpus, inventory.visible
    if visible is None or not gpus:
        return gpus, ()
    allowed: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        matching = _matching(entry, (gpu for card in gpus for gpu in (card, *card.parts)))
        if len(matching) != 1 or matching[0] in allowed:
            if entry not in ("", "-1"):  # those end it on purpose
                ends = f"{entry!r} is no further GPU of this machine and ends the list"
                return tuple(allowed), (f"{_setting(inventory)}: {ends}",)
            return tuple(allowed), () if allowed else (f"{_setting(inventory)} hides all GPUs",)
        allowed += matching
    return tuple(allowed), ()


def _matching(name: str, gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return the GPUs and parts that a name stands for: a number, or the beginning of a UUID."""
    if name.startswith(("GPU-", "MIG-")):
        return [gpu for gpu in gpus if gpu.uuid.startswith(name)]
    return [gpu for gpu in gpus if gpu.card is None and name == str(gpu.index)]


def _setting(inventory: Inventory) -> str:
    name = inventory.vendor_module.VISIBLE[0]
    return f"{name}={inventory.visible}" if inventory.visible else f"{name}, set to nothing,"


def memory_of_each(devices: Sequence[Device], seen: Inventory) -> int | None:
    """Return the bytes of the smallest device; None if that is not known.

    A GPU has all of its memory. CPU workers divide what is free on this machine.
    """
    if devices[0].type == "cpu":
        now = machine.read()
        return (now.memory - now.used) // len(devices) if now.memory else None
    sizes = {unit.uuid: unit.memory for unit in units(seen.gpus)}
    if any(device.uuid not in sizes for device in devices):
        return None
    return min(sizes[device.uuid] for device in devices)


# Free GPUs, and the order of preference.


def pick(request: Request, gpus: Sequence[Gpu]) -> tuple[list[Gpu], str]:
    """Pick the GPUs for a request like `free:2` among the allowed ones, and say why.

    Raises DeviceError if this machine does not have as many, DevicesBusy if they are in use now.
    """
    assert request.pick is not None
    assert request.count is not None
    able = large_enough(request, gpus)
    if len(able) < request.count:
        cards = [gpu for gpu in gpus if gpu.card is None]
        there = f"{_count(len(cards), 'can', 'can')} be used here{f'; {ONE_PART}' * (len(cards) < len(gpus))}"
        if request.memory:
            there = f"they have {', '.join(f'GPU {gpu.number} {gpu.memory / (1 << 30):.1f} GiB' for gpu in gpus)}"
        raise DeviceError(f"--devices {request}: {_count(request.count, 'is', 'are')} asked for; {there}")
    reasons = {gpu: why_unavailable(gpu, request) for gpu in able}
    picked = by_preference([gpu for gpu in able if not reasons[gpu]])[: request.count]
    others = "; ".join(f"GPU {gpu.number}: {reason}" for gpu, reason in reasons.items() if reason)
    if len(picked) < request.count:
        raise DevicesBusy(f"--devices {request}: {_count(len(picked), 'is', 'are')} available now; {others}", others)
    picked.sort(key=lambda gpu: gpu.order)
    busy = {gpu: "" if gpu.utilisation is None else f"{gpu.utilisation}% busy, " for gpu in picked}
    chosen = ", ".join(f"GPU {gpu.number} ({busy[gpu]}{gpu.free_memory / (1 << 30):.1f} GiB free)" for gpu in picked)
    return picked, f"--devices {request} picked {chosen}{f'; not {others}' if others else ''}"


def large_enough(request: Request, gpus: Iterable[Gpu]) -> list[Gpu]:
    """Select GPUs with enough memory; parts (MIG) only if one device is requested."""
    return [gpu for gpu in gpus if gpu.memory >= request.memory and (request.count == 1 or gpu.card is None)]


def by_preference(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Sort by least work, then most free memory."""

    def work(gpu: Gpu) -> tuple[int, int, int, tuple[int, int]]:
        computing = sum(process.kind == "compute" for process in gpu.processes or ())
        return computing, gpu.utilisation or 0, -gpu.free_memory, gpu.order

    return sorted(gpus, key=work)


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
    computing = [process for process in gpu.processes or () if process.kind == "compute"]
    if computing:
        return ", ".join(f"{user.user} pid {user.pid} {user.command[:60]}".strip() for user in computing)
    if gpu.used is not None and gpu.used > max(IDLE_MEMORY, IDLE_SHARE * gpu.memory):
        return f"{gpu.used / (1 << 30):.1f} GiB are in use by processes that cannot be seen from here"
    if gpu.utilisation is not None and gpu.utilisation > IDLE_UTILISATION:
        return f"{gpu.utilisation}% busy by processes that cannot be seen from here"
    return ""


def _count(count: int, singular: str, plural: str) -> str:
    return f"{count} GPU {singular}" if count == 1 else f"{count or 'no'} GPUs {plural}"
