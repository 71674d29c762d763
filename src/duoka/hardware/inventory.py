"""The devices of this machine at one moment: GPUs, their users, and CPU cores.

Does not import torch and does not start the GPUs' runtime: each worker does that on its own GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from duoka.hardware.gpu import Device, Gpu
from duoka.hardware.machine import cores
from duoka.hardware.vendors import TYPES, VENDORS, Vendor
from duoka.system import environment

__all__ = ["Gpu", "Inventory", "cores", "problems", "read", "units"]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices of a machine."""

    gpus: tuple[Gpu, ...] = ()  # accelerators of one vendor, in the order of their numbers
    cores: int = 1  # available to this process
    no_gpus: str = "this machine has no GPU"  # reason why there are none
    versions: Mapping[str, str] = field(default_factory=dict)  # of the driver and of what it runs, by their names
    vendor: str = next(iter(VENDORS))  # its name in `VENDORS`
    visible: str | None = None  # the variable that hides some of them from this process, if it is set
    others: tuple[Gpu, ...] = ()  # of other vendors, which are shown and not chosen
    why_others: str = ""  # why not
    lacking: str = ""  # why torch cannot use `gpus`; empty if it can

    @property
    def vendor_module(self) -> Vendor:
        """The vendor's file."""
        return VENDORS[self.vendor]


def units(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return the devices that a worker can use: whole GPUs, and the parts of split ones."""
    return [unit for gpu in gpus for unit in (gpu.parts if gpu.is_split else (gpu,))]


def problems(devices: Sequence[Device], inventory: Inventory) -> list[str]:
    """Return for each device what prevents its use, as the driver says; empty if nothing, or it does not answer."""
    there = {unit.number: unit.problem for unit in units(inventory.gpus)}
    # A device that is gone from the bus is not listed; a driver that lists none of them has failed to answer.
    answers = any(there.get(device.number) == "" for device in devices)
    return [there.get(device.number, "the driver does not list it any more" * answers) for device in devices]


def read(kind: str = "auto") -> Inventory:
    """Query this machine; milliseconds for each GPU.

    kind: torch's word for a type of devices, to see those only; "auto" and "gpu" see one vendor's, of all.
    `allocation.with_holders` adds the runs that have locked them.
    """
    asked = {name: vendor for name, vendor in VENDORS.items() if kind == vendor.TYPE or vendor.IN_AUTO}
    if kind in TYPES:
        asked = {name: vendor for name, vendor in asked.items() if kind == vendor.TYPE}
    reports = {name: vendor.ask() for name, vendor in asked.items()}
    there = [name for name, report in reports.items() if report.gpus]
    chosen = next((name for name in there if not reports[name].lacking), next(iter(reports)))
    report, others = reports[chosen], [name for name in there if name != chosen]
    left_out = [f"{len(reports[name].gpus)} {name} GPUs ({reports[name].lacking or 'not chosen'})" for name in others]
    why_others = f"there are also {', '.join(left_out)}" if left_out else ""
    whys = [report.why_none for report in reports.values()]
    return Inventory(
        report.gpus,
        cores(),
        "; ".join(filter(None, (*whys, why_others))) or "this machine has no GPU",
        report.versions,
        chosen,
        environment.first_set(asked[chosen].VISIBLE),
        tuple(gpu for name in others for gpu in reports[name].gpus),
        why_others,
        report.lacking,
    )
