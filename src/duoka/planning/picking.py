"""`duoka.devices("free:2")`: devices for a program that places tensors itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from duoka.errors import DeviceError
from duoka.hardware.allocation import allocate
from duoka.hardware.choice import Choice, allowed_gpus, choose
from duoka.hardware.gpu import Device
from duoka.hardware.inventory import Inventory
from duoka.hardware.locks import HeldLocks
from duoka.hardware.spec import parse
from duoka.hardware.vendors import variables_for
from duoka.planning.options import waiting
from duoka.system import environment
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
        self._held.close()

    def __enter__(self) -> Picked:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def devices(request: str = "auto", *, wait: str | float = 0) -> Picked:
    """Pick devices of this machine, as `--devices` does.

    Args:
        request: in the grammar of `--devices`: "free:2", "free:2,mem>=10G", "best:1", "0,3", "GPU-3c1a6d0e", "cpu:4".
            Numbers are physical, as in `duoka gpus`. A process can use one part of a GPU (MIG).
        wait: time to queue until devices are free, in seconds or like "30m"; 0 does not wait.

    Returns:
        One torch.device for each, numbered as torch numbers the GPUs visible to this process.

    Raises:
        DeviceError: a device does not exist, or may not be used.
        DevicesBusy: other runs use the devices, and the time to wait is over.
        OptionError: `request` or `wait` is not in the grammar.
    """
    command = f"python {sys.argv[0]}" if sys.argv and sys.argv[0] else "python"  # what others see as the holder
    asked = parse(request)

    def decide(inventory: Inventory) -> tuple[Choice, list[torch.device]]:
        choice = choose(asked, inventory)
        return choice, [_as_torch_names(device, inventory) for device in choice.devices]

    allocation = allocate(asked, command, decide, lambda decided: decided[0].devices, waiting(wait), say)
    choice, names = allocation.decided
    if any(device.part is not None for device in choice.devices):
        environment.set_variables(variables_for(choice.devices))
    return Picked(names, choice.notes + allocation.notes, allocation.locks)


def _as_torch_names(device: Device, inventory: Inventory) -> torch.device:
    if device.index is None:
        return torch.device(device.type)
    module, order = getattr(torch, device.type), inventory.vendor_module.ORDER
    is_in_use = getattr(module, "is_initialized", bool)()
    if device.part is not None:
        if is_in_use:
            raise DeviceError(f"{device} is a part of a GPU (MIG): call duoka.devices before torch uses GPUs")
        return torch.device(device.type, 0)  # a process sees one part only
    # The driver's library reads the order of its numbers (fastest first, or as on the bus) once, when it starts.
    if is_in_use and any(environment.variable(name) != value for name, value in order.items()):
        uuids = [f"GPU-{module.get_device_properties(index).uuid}" for index in range(module.device_count())]
        return torch.device(device.type, uuids.index(device.uuid))
    environment.set_variables(order)
    seen, _ = allowed_gpus(inventory)
    return torch.device(device.type, [gpu.index for gpu in seen].index(device.index))
