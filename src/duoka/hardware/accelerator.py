"""The accelerator of this process, of whatever vendor, in torch's own words; copies to and from it.

Copies go through pinned memory, in a stream of their own: neither the host nor the current stream waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    return torch.get_device_module(name) if (name := kind()) else None


def in_use() -> Any:
    """Return torch's module of it, if its runtime has started in this process; else None."""
    runtime = module()
    # Not all have `is_initialized`: those without one (mps) are there, or not.
    started = runtime is not None and getattr(runtime, "is_initialized", torch.accelerator.is_available)()
    return runtime if started else None


def has_streams(device: torch.device) -> bool:
    """Return whether copies to a device can overlap with its kernels."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def current_stream() -> torch.Stream | None:
    """Return the current stream of the accelerator; None if it is not in use, or has none."""
    return torch.accelerator.current_stream() if hasattr(in_use(), "Stream") else None


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


def wait_for_copies(device: torch.device | None) -> None:
    """Let the host wait for what the current stream of a device copies to pinned memory, if it has streams.

    torch itself does not wait when it copies the numbers of GradScaler to where offloaded gradients are.
    """
    if device is not None and has_streams(device):
        torch.accelerator.current_stream(device).synchronize()


class CopyStream:
    """A stream of copies to or from a device, if this has streams. device: None: tensors stay where they are."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._stream = torch.Stream(device) if device is not None and has_streams(device) else None

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this is the current stream."""
        return nullcontext() if self._stream is None else self._stream

    def reads(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor of another stream until this one has done its work so far."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def give(self, tensor: Tensor) -> Tensor:
        """Let the current stream wait for what this one has been given so far, and use its tensor."""
        if self._stream is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._stream)
            tensor.record_stream(current)  # else its memory is this stream's again as soon as Python drops it
        return tensor

    def upload(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the tensors, one after the other, on the device; this must be the current stream."""
        if self._stream is None:
            return torch.cat(list(rows)).to(self._device)
        size = sum(part.numel() for part in rows)
        # torch's allocator of pinned memory gives it to nobody else until the copy is done.
        pinned = torch.empty(size, dtype=rows[0].dtype, device="cpu", pin_memory=True)
        return torch.cat(list(rows), out=pinned).to(self._device, non_blocking=True)

    def download(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return a tensor's copy, and a function that waits until it is complete; this must be the current stream."""
        if self._stream is None:
            return tensor if self._device is None else tensor.cpu(), lambda: None
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        return pinned, self._stream.record_event().synchronize
