"""The memory that each of several devices has for a run."""

from __future__ import annotations

from collections.abc import Sequence

from duoka.devices import Device, machine
from duoka.devices.inventory import Inventory, units


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
