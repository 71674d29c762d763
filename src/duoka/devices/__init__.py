"""The devices of this machine, and the choice of devices for a request.

spec.py         the grammar of --devices
gpu.py          one GPU and its users, at one moment
vendors/        what each vendor of GPUs has its own way for
processes.py    queries of the kernel
cgroup.py       limits of a container or a scheduler
locks.py        a file lock for each GPU, so that two runs never take the same, and a queue
inventory.py    all devices of this machine, at one moment
machine.py      its processor and memory
table.py        an inventory as text
choose()        the devices for a request, one for each worker
pick.py         the free GPUs, and the order of preference
waiting.py      waits until devices are free
allocation.py   reads the inventory, chooses, and locks, in one step
accelerator.py  the accelerator of this process, in torch's own words
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from duoka.devices.gpu import Gpu
from duoka.devices.inventory import Inventory, units
from duoka.devices.pick import pick
from duoka.devices.spec import Request
from duoka.errors import DeviceError

__all__ = ["Choice", "Device", "allowed_gpus", "choose"]


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine.

    index: physical; None for a CPU worker. uuid: of a GPU, or of a part of one. part: number of the
    part, of a GPU that is split (MIG); else None.
    """

    type: str  # as torch calls it
    index: int | None = None
    name: str = ""
    uuid: str = field(default="", compare=False)
    part: int | None = None

    def __str__(self) -> str:
        """The name shown to users: `GPU 3`, `GPU 3:0` (a part), `CPU`."""
        return "CPU" if self.index is None else f"GPU {self.number}"

    @property
    def number(self) -> str:
        """The number as in `duoka gpus`: `3`, and `3:0` for a part; empty for a CPU worker."""
        return "" if self.index is None else str(self.index) if self.part is None else f"{self.index}:{self.part}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen devices in the order of ranks, and notes for the user."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()


def choose(request: Request, inventory: Inventory) -> Choice:
    """Choose the devices for a request.

    Args:
        request: the parsed `--devices`.
        inventory: of this machine. Only GPUs that its variable names are chosen, in that order.

    Raises:
        DeviceError: a device does not exist or is hidden, or there are too few.
        DevicesBusy: there are enough devices, but others use them.
    """
    if request.type == "cpu":
        return Choice(_cpus(request.count))
    kind = inventory.of.TYPE
    if request.type not in ("auto", "gpu", kind):
        raise DeviceError(f"--devices {request}: this machine has no {request.type} device; use auto or cpu")
    allowed, notes = allowed_gpus(inventory)
    if request.type == "auto":
        notes += (inventory.why_others,) * bool(inventory.why_others)
        if not allowed:
            return Choice(_cpus(request.count), notes)
    gpus, why = _gpus_for(request, allowed, inventory)
    notes += why
    if inventory.of.IS_SORTED:
        gpus = sorted(gpus, key=lambda gpu: gpu.index)
    if inventory.visible is not None:
        mapping = ", ".join(f"{kind}:{index} = GPU {gpu.number}" for index, gpu in enumerate(gpus))
        notes = (*notes, f"{_setting(inventory)} respected: {mapping}")
    return Choice(tuple(_device(kind, gpu) for gpu in gpus), notes)


def _device(kind: str, gpu: Gpu) -> Device:
    if gpu.card is None:
        return Device(kind, gpu.index, gpu.name, gpu.uuid)
    return Device(kind, gpu.card, gpu.name, gpu.uuid, gpu.index)


def _cpus(count: int | None) -> tuple[Device, ...]:
    return (Device("cpu"),) * (count or 1)


def _gpus_for(request: Request, allowed: tuple[Gpu, ...], inventory: Inventory) -> tuple[list[Gpu], tuple[str, ...]]:
    """Return the requested GPUs among the allowed ones, and notes on why they were picked."""
    if not allowed:
        why = f"{_setting(inventory)} hides all GPUs" if inventory.gpus else inventory.no_gpus
        raise DeviceError(f"--devices {request}: {why}; use auto or cpu")
    if request.pick:
        gpus, why = pick(request, [gpu for gpu in units(allowed) if not gpu.problem])
        return gpus, (why,)
    if request.indices or request.uuids:
        return _gpus_named(request, allowed, inventory), ()
    usable = [gpu for gpu in allowed if not (gpu.problem or gpu.is_split)]
    parts = [part for part in units(allowed) if part.card is not None and not part.problem]
    left_out = tuple(f"GPU {gpu.number} is left out: {why}" for gpu in allowed if (why := _why_unusable(gpu)))
    if not usable and parts and request.count in (None, 1):
        rest = " of several; --devices free:1 takes one that nobody uses" if len(parts) > 1 else ""
        return parts[:1], (f"GPU {parts[0].number} is a part (MIG){rest}",)
    if (request.count is not None and request.count > len(usable)) or not usable:
        asked = "GPUs are" if request.count is None else f"{request.count} GPUs are"
        ill = f"; {'; '.join(left_out)}" if left_out else ""
        raise DeviceError(f"--devices {request}: {asked} asked for; {_allowed_text(allowed, inventory)}{ill}")
    return usable[: request.count], left_out


def _why_unusable(gpu: Gpu) -> str:
    """Return why a GPU is not taken unless named; empty if it is usable."""
    return gpu.problem or ("it is split into parts (MIG), of which a run can use one" if gpu.is_split else "")


def _gpus_named(request: Request, allowed: tuple[Gpu, ...], inventory: Inventory) -> list[Gpu]:
    """Return the GPUs of a list of numbers or UUIDs."""
    gpus: list[Gpu] = []
    for name in request.indices or request.uuids:
        called = f"GPU {name}" if isinstance(name, int) else name
        matching = [gpu for gpu in dict.fromkeys((*allowed, *units(allowed))) if _matches(gpu, name)]
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


def _matches(gpu: Gpu, name: int | str) -> bool:
    """Match a GPU or part: by the number of a GPU, or the beginning of a UUID."""
    return gpu.uuid.startswith(name) if isinstance(name, str) else gpu.card is None and gpu.index == name


def _allowed_text(allowed: tuple[Gpu, ...], inventory: Inventory) -> str:
    may = f"{_setting(inventory)} allows" if inventory.visible is not None else "this machine has"
    numbers = _listed(gpu.number for gpu in sorted(allowed, key=lambda gpu: gpu.place))
    return f"{may} {numbers} (numbers as in {inventory.of.TOOL})"


def allowed_gpus(inventory: Inventory) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that the variable allows, in its order, and a note on an entry that names none.

    As for the runtime, the first entry that names no GPU of this machine ends the list.
    """
    gpus, visible = inventory.gpus, inventory.visible
    if visible is None or not gpus:
        return gpus, ()
    allowed: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named(entry.strip(), gpus)
        if gpu is None or gpu in allowed:
            return tuple(allowed), _end_of_list(entry.strip(), inventory, bool(allowed))
        allowed.append(gpu)
    return tuple(allowed), ()


def _end_of_list(entry: str, inventory: Inventory, some: bool) -> tuple[str, ...]:
    if entry not in ("", "-1"):
        return (f"{_setting(inventory)}: {entry!r} is no further GPU of this machine and ends the list",)
    return () if some else (f"{_setting(inventory)} hides all GPUs",)


def _named(entry: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    """Return the GPU or part that an entry of the variable names: a number, or the beginning of a UUID."""
    if entry.startswith(("GPU-", "MIG-")):
        matching = [gpu for card in gpus for gpu in (card, *card.parts) if gpu.uuid.startswith(entry)]
    else:
        matching = [gpu for gpu in gpus if entry == str(gpu.index)]
    return matching[0] if len(matching) == 1 else None


def _setting(inventory: Inventory) -> str:
    name = inventory.of.VISIBLE[0]
    return f"{name}={inventory.visible}" if inventory.visible else f"{name}, set to nothing,"


def _listed(numbers: Iterable[str]) -> str:
    words = list(numbers)
    return f"GPU {words[0]}" if len(words) == 1 else f"GPUs {', '.join(words[:-1])} and {words[-1]}"


class _CallableModule(ModuleType):
    """Makes this package callable: `duoka.devices("free:2")` picks devices."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("duoka.planning.picking").devices(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
