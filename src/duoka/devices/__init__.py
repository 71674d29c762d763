"""What this machine has, what is asked for, and which devices that makes.

spec.py         the grammar of --devices
inventory.py    what this machine has
choose()        the devices, one for each worker
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from duoka.devices.inventory import Gpu, Inventory, count_of
from duoka.devices.spec import Request
from duoka.errors import DeviceError

__all__ = ["Choice", "Device", "choose"]


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine. `index` is physical, in PCI bus order; None for a CPU worker."""

    type: str  # cpu, cuda, mps, xpu
    index: int | None = None
    name: str = ""

    def __str__(self) -> str:
        """As people call it: `GPU 3`, `CPU`, `xpu 0`."""
        word = {"cuda": "GPU", "cpu": "CPU"}.get(self.type, self.type)
        return word if self.index is None else f"{word} {self.index}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The devices chosen, in the order of the ranks, and what is to be told about them."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()


def choose(request: Request, inventory: Inventory, visible: str | None) -> Choice:
    """Pick the devices for a request.

    Args:
        request: what is asked for.
        inventory: what the machine has.
        visible: CUDA_VISIBLE_DEVICES as it is set, or None. Only GPUs that it names are chosen, in its order.

    Raises:
        DeviceError: a device is not there or is hidden, or there are not as many.
    """
    if request.type == "cpu":
        return Choice(_cpus(request.count))
    if request.type in ("mps", "xpu"):
        return Choice(_other(request, count_of(request.type)))
    allowed, notes = _allowed(inventory.gpus, visible)
    if request.type == "auto" and not allowed:
        return Choice(_cpus(request.count), notes)
    gpus = _pick(request, allowed, inventory, visible)
    if visible is not None:
        mapping = ", ".join(f"cuda:{place} = GPU {gpu.index}" for place, gpu in enumerate(gpus))
        notes = (*notes, f"{_setting(visible)} respected: {mapping}")
    return Choice(tuple(Device("cuda", gpu.index, gpu.name) for gpu in gpus), notes)


def _cpus(count: int | None) -> tuple[Device, ...]:
    return (Device("cpu"),) * (count or 1)


def _other(request: Request, count: int) -> tuple[Device, ...]:
    index = request.indices[0] if request.indices else 0
    if count == 0:
        raise DeviceError(f"--devices {request}: torch finds no {request.type} device here; use auto or cpu")
    if index >= count:
        raise DeviceError(f"--devices {request}: there are {count} {request.type} devices, numbered from 0")
    return (Device(request.type, index),)


def _pick(request: Request, allowed: tuple[Gpu, ...], inventory: Inventory, visible: str | None) -> list[Gpu]:
    """The GPUs asked for, out of those that may be used."""
    numbers = [gpu.index for gpu in allowed]
    if not allowed:
        why = f"{_setting(visible)} hides all GPUs" if inventory.gpus else inventory.no_gpus
        raise DeviceError(f"--devices {request}: {why}; use auto or cpu")
    may = f"{_setting(visible)} allows" if visible is not None else "this machine has"
    may = f"{may} {_listed(sorted(numbers))} (numbers as in nvidia-smi)"
    if request.count is not None and request.count > len(allowed):
        raise DeviceError(f"--devices {request}: {request.count} GPUs are asked for; {may}")
    for index in request.indices:
        if index not in numbers:
            raise DeviceError(f"--devices {request}: GPU {index} cannot be used; {may}")
    if request.indices:
        return [allowed[numbers.index(index)] for index in request.indices]
    return list(allowed[: request.count])


def _allowed(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, and a note where it names what is not there.

    As in CUDA, the first entry that is no GPU of this machine ends the list.
    """
    if visible is None or not gpus:
        return gpus, ()
    allowed: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _named(entry.strip(), gpus)
        if gpu is None or gpu in allowed:
            return tuple(allowed), _end_of_list(entry.strip(), visible, bool(allowed))
        allowed.append(gpu)
    return tuple(allowed), ()


def _end_of_list(entry: str, visible: str, some: bool) -> tuple[str, ...]:
    if entry not in ("", "-1"):
        return (f"{_setting(visible)}: {entry!r} is no further GPU of this machine and ends the list, as in CUDA",)
    return () if some else (f"{_setting(visible)} hides all GPUs",)


def _named(entry: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU that an entry of CUDA_VISIBLE_DEVICES names: by number, or by the beginning of its UUID."""
    if entry.startswith("MIG-"):
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES names {entry}, a part of a GPU, and only whole GPUs can be shared out; "
            "name GPUs by number or UUID there, or use --devices cpu"
        )
    found = [gpu for gpu in gpus if entry == str(gpu.index) or (entry[:4] == "GPU-" and gpu.uuid.startswith(entry))]
    return found[0] if len(found) == 1 else None


def _setting(visible: str | None) -> str:
    return f"CUDA_VISIBLE_DEVICES={visible}" if visible else "CUDA_VISIBLE_DEVICES, set to nothing,"


def _listed(numbers: Iterable[int]) -> str:
    words = [str(number) for number in numbers]
    return f"GPU {words[0]}" if len(words) == 1 else f"GPUs {', '.join(words[:-1])} and {words[-1]}"
