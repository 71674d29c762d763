"""Vendors of accelerators: one file for each, with the names of `Vendor`, and a line in `VENDORS`.

`report.py` has what is common to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from duoka.hardware.vendors import amd, apple, ascend, intel, nvidia
from duoka.hardware.vendors.report import Report
from duoka.system import environment

if TYPE_CHECKING:
    from duoka.hardware.gpu import Device


class Vendor(Protocol):
    """The names of a vendor's file."""

    TYPE: str  # torch's word for its devices
    TOOL: str  # the driver's program whose numbers duoka uses
    VISIBLE: tuple[str, ...]  # environment variables that name the visible devices; the first that is set counts
    ORDER: dict[str, str]  # variables that make the runtime number devices as TOOL does
    IN_AUTO: bool  # whether `--devices auto` takes them
    IS_SORTED: bool  # whether a process can see them in ascending order only
    FAULT: str  # regular expression: an error after which a process cannot use the device
    ABSENT: str  # regular expression: torch's error where a script asks for a device, and there is none

    def ask(self) -> Report:
        """Query the devices of this machine and their users, without importing torch or starting the runtime."""


VENDORS: dict[str, Vendor] = {"NVIDIA": nvidia, "AMD": amd, "Ascend": ascend, "Intel": intel, "Apple": apple}
FAULTS = "|".join(vendor.FAULT for vendor in VENDORS.values())
SHOWS_TRANSPORT = {  # variables, by torch's backend
    "nccl": "NCCL_DEBUG=INFO shows the transport in use; see the P2P findings above",
    "hccl": "ASCEND_GLOBAL_LOG_LEVEL=1 ASCEND_SLOG_PRINT_TO_STDOUT=1 shows what HCCL does",
}
NO_GPU = "|".join(["not linked with support for", *(vendor.ABSENT for vendor in VENDORS.values())])
TYPES = tuple(dict.fromkeys(vendor.TYPE for vendor in VENDORS.values()))


def visible(kind: str) -> str | None:
    """Return the variable that says which devices of a type this process sees; None if it is not set."""
    return environment.first_set(
        name for vendor in VENDORS.values() if kind == vendor.TYPE for name in vendor.VISIBLE
    )


def variables_for(devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables of a process that sees only these devices, in this order; no accelerator if they are CPUs.

    Devices of other types are hidden for CPUs only.
    """
    variables: dict[str, str] = {}
    for vendor in VENDORS.values():
        if devices[0].type in ("cpu", vendor.TYPE):
            # The runtime knows a part of a GPU by its UUID only.
            names = (device.uuid if device.part is not None else str(device.index) for device in devices)
            variables |= dict.fromkeys(vendor.VISIBLE, "" if devices[0].type == "cpu" else ",".join(names))
            variables |= vendor.ORDER
    return variables
