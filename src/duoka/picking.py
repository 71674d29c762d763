"""Devices for a program that picks its own: `duoka.devices("free:2")`."""

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


class Picked(tuple[torch.device, ...]):
    """Devices that were picked, as torch names them in this process. No other run of duoka picks them meanwhile.

    They are kept until `release`, the end of a `with` block, or the end of this process.
    why: why these, in words; empty where they were named.
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
        """Let other runs have them."""
        self._held.release()

    def __enter__(self) -> Picked:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def devices(request: str = "auto", *, wait: str | float = 0) -> Picked:
    """Pick devices of this machine, as `--devices` does.

    Args:
        request: in the words of `--devices`: "free:2", "free:2,mem>=10G", "best:1", "0,3", "GPU-3c1a6d0e", "cpu:4".
            Numbers are physical, as nvidia-smi shows them. Of a part of a GPU (MIG) this process sees no other.
        wait: how long to queue until they are free, in seconds or like "30m"; 0 does not wait.

    Returns:
        One torch.device for each, numbered as torch numbers the cards that this process sees.

    Raises:
        DeviceError: a device is not there, or may not be used.
        DevicesBusy: others use them now, and the time to wait is over.
        OptionError: `request` or `wait` is not in the grammar.
    """
    asked = AllocationRequest(parse(request), environment.visible_cards(), _command())

    def decide(found: Inventory) -> tuple[Choice, list[torch.device]]:
        choice = choose(asked.request, found, asked.visible)
        return choice, [_as_torch_names(device, found, asked.visible) for device in choice.devices]

    allocation = allocate(asked, decide, lambda decided: decided[0].devices, waiting(wait), _say)
    choice, names = allocation.decided
    if any(device.part is not None for device in choice.devices):
        environment.show_cards(choice.devices)
    return Picked(names, choice.notes + allocation.notes, allocation.locks)


def _as_torch_names(device: Device, inventory: Inventory, visible: str | None) -> torch.device:
    if device.type != "cuda":
        return torch.device(device.type) if device.index is None else torch.device(device.type, device.index)
    if device.part is not None:
        if torch.cuda.is_initialized():
            raise DeviceError(f"{device} is a part (MIG), of which a process sees one: ask before CUDA is used")
        return torch.device("cuda", 0)
    if torch.cuda.is_initialized() and not environment.cards_are_ordered_by_bus():
        return torch.device("cuda", _place_by_uuid(device))
    environment.order_cards_by_bus()
    seen, _ = allowed_gpus(inventory.gpus, visible)
    return torch.device("cuda", [gpu.index for gpu in seen].index(device.index or 0))


def _place_by_uuid(device: Device) -> int:
    """The number of a card in a process whose CUDA came up with an order of its own."""

    def uuid(index: int) -> Any:
        return torch.cuda.get_device_properties(index).uuid

    return next(index for index in range(torch.cuda.device_count()) if f"GPU-{uuid(index)}" == device.uuid)


def _command() -> str:
    return f"python {sys.argv[0]}" if sys.argv and sys.argv[0] else "python"


def _say(text: str) -> None:
    print(f"duoka: {text}", file=sys.stderr, flush=True)
