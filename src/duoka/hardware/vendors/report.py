"""What a vendor's driver says, and parts of asking for it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from duoka.hardware.gpu import Gpu
from duoka.system.time_limit import within

TIME_LIMIT = 30.0  # seconds; a driver without persistence mode takes one or two to wake each GPU
PCI = Path("/sys/bus/pci/devices")
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Report:
    """The devices of a vendor here."""

    gpus: tuple[Gpu, ...] = ()
    why_none: str = ""  # why there are none; empty if there are some, or no driver is here
    versions: Mapping[str, str] = field(default_factory=dict)
    lacking: str = ""  # why torch, as it is installed here, cannot use them; empty if it can, or fails by itself


def asked(vendor: str, ask: Callable[[], Report]) -> Report:
    """Call `ask`, which calls the driver, and may not return."""
    try:
        return within(TIME_LIMIT, ask)
    except TimeoutError:
        return Report(
            why_none=f"the {vendor} driver has not responded for {TIME_LIMIT:g} s; look in dmesg for the cause"
        )


def output(*words: str) -> str:
    """Return what a program of the driver prints. Raises OSError if there is no such program, or it fails."""
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise OSError(f"{' '.join(words)}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def on_bus(vendor: str) -> list[str]:
    """Return the addresses of a PCI vendor's (`0x10de`) GPUs, in the order of the bus, even without a driver."""
    addresses = []
    for device in PCI.glob("*"):
        with suppress(OSError):
            kind = (device / "class").read_text().strip()
            if (device / "vendor").read_text().strip() == vendor and kind.startswith("0x03"):  # display controllers
                addresses.append(device.name)
    return sorted(addresses)


def torch_is_built_for(word: str) -> bool:
    """Return whether torch is built for it, as torch/version.py says. Does not import torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    with suppress(OSError):
        text = Path(spec.origin).with_name("version.py").read_text()
        return re.search(rf"^{word}\b[^=\n]*= ['\"]", text, re.MULTILINE) is not None  # else: `hip = None`
    return False
