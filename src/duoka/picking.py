"""`duoka.devices("free:2")`: devices for a program that places tensors itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from duoka import environment
from duoka.devices import Choice, Device, allowed_gpus, choose
from duoka.devices.allocation import AllocationRequest, allocate
from duoka.devices.inventory import Inventory
from duoka.devices.locks import HeldLocks
from duoka.devices.spec import parse
from duoka.errors import DeviceError
from duoka.options import waiting
from duoka.system.messages import say


class Picked(tuple[torch.device, ...]):
    """Devices, as torch names them in this process. No other run of duoka takes them.

    They are locked until `release`, the end of a `with` block, or the end of this process.
    why: reasons for the choice, in words; empty if they were named.
    """

    why: tuple[str, ...]
    _held: HeldLocks

    def __new__(
        cls, devices: Iterable[torch.device], why: tuple[str, ...] = (), held: HeldLocks | None = None
    ) -> Picked:
        """Keep `held` together with the devices."""
        picked = super().__new__(cls, devices)
        picked.why, picked._held = why, held or HeldLocks()
        return picked

    def release(self) -> None:
        """Release the locks."""
        self._held.release()

    def __enter__(self) -> Picked:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def devices(request: str = "auto", *, wait: str | float = 0) -> Picked:
    """Pick devices of this machine, as `--devices` does.

    Args:
        request: in the grammar of `--devices`: "free:2", "free:2,mem>=10G", "best:1", "0,3", "GPU-3c1a6d0e", "cpu:4".
            Numbers are physical, as in nvidia-smi. A process can use one part of a GPU (MIG).
        wait: time to queue until devices are free, in seconds or like "30m"; 0 does not wait.

    Returns:
        One torch.device for each, numbered as torch numbers the GPUs visible to this process.

    Raises:
        DeviceError: a device does not exist, or may not be used.
        DevicesBusy: other runs use the devices, and the time to wait is over.
        OptionError: `request` or `wait` is not in the grammar.
    """
    asked = AllocationRequest(parse(request), environment.visible_gpus(), _command())

    def decide(found: Inventory) -> tuple[Choice, list[torch.device]]:
        choice = choose(asked.request, found, asked.visible)
        return choice, [_as_torch_names(device, found, asked.visible) for device in choice.devices]

    allocation = allocate(asked, decide, lambda decided: decided[0].devices, waiting(wait), say)
    choice, names = allocation.decided
    if any(device.part is not None for device in choice.devices):
        environment.set_visible_devices(choice.devices)
    return Picked(names, choice.notes + allocation.notes, allocation.locks)


def _as_torch_names(device: Device, inventory: Inventory, visible: str | None) -> torch.device:
    if device.type != "cuda":
        return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)
    if device.part is not None:
        if torch.cuda.is_initialized():
            raise DeviceError(f"{device} is a part of a GPU (MIG): call duoka.devices before CUDA is initialised")
        return torch.device("cuda", 0)
    if torch.cuda.is_initialized() and not environment.gpus_are_ordered_by_bus():
        return torch.device("cuda", _place_by_uuid(device))
    environment.order_gpus_by_bus()
    seen, _ = allowed_gpus(inventory.gpus, visible)
    return torch.device("cuda", [gpu.index for gpu in seen].index(device.index or 0))


def _place_by_uuid(device: Device) -> int:
    """Return the number of a GPU in a process whose CUDA was initialised with another order."""

    def uuid(index: int) -> Any:
        return torch.cuda.get_device_properties(index).uuid

    return next(index for index in range(torch.cuda.device_count()) if f"GPU-{uuid(index)}" == device.uuid)


def _command() -> str:
    return f"python {sys.argv[0]}" if sys.argv and sys.argv[0] else "python"
