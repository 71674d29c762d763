"""The accelerator of this process, of whatever vendor, in torch's own words."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from duoka.hardware import machine
from duoka.hardware.vendors import TYPES, VENDORS

# The methods that move a tensor to an accelerator, themselves: scripts and interceptions wrap them.
MOVES = tuple(getattr(Tensor, name) for name in TYPES if hasattr(Tensor, name))


def kind() -> str:
    """Return the type of this build's accelerator; empty if it has none."""
    device = torch.accelerator.current_accelerator()
    return "" if device is None else device.type


def module() -> Any:
    """Return torch's module of it; None if there is none."""
    return torch.get_device_module(kind()) if kind() else None


def in_use() -> Any:
    """Return torch's module of it, if its runtime has started in this process; else None."""
    runtime = module()
    started = runtime is not None and getattr(runtime, "is_initialized", torch.accelerator.is_available)()
    return runtime if started else None


def has_streams(device: torch.device) -> bool:
    """Return whether copies to a device can overlap with its kernels."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def best() -> torch.device:
    """Return the accelerator, if there is one now that is taken without being named, else the CPU."""
    runtime = module()
    named = any(kind() == vendor.TYPE and not vendor.IN_AUTO for vendor in VENDORS.values())
    return torch.device(kind() if runtime is not None and runtime.is_available() and not named else "cpu")


def memory_of(device: torch.device) -> float:
    """Return the bytes of memory of a device; of a CPU, or one that shares its memory, those of the machine."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    if device.type == "cpu" or properties is None:
        return machine.read().memory or math.inf
    return float(properties(device).total_memory)
