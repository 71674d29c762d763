"""Copies between the host's memory and an accelerator, beside what the accelerator computes.

They go through pinned memory, in a stream of their own: neither the host nor the current stream waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from duoka.hardware.accelerator import has_streams


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
            tensor.record_stream(current)
        return tensor

    def upload(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the tensors, one after the other, on the device; this must be the current stream."""
        if self._stream is None:
            return torch.cat(list(rows)).to(self._device)
        size = sum(part.numel() for part in rows)
        pinned = torch.empty(size, dtype=rows[0].dtype, device="cpu", pin_memory=True)
        return torch.cat(list(rows), out=pinned).to(self._device, non_blocking=True)

    def download(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return a tensor's copy, and a function that waits until it is complete; this must be the current stream."""
        if self._stream is None:
            return tensor if self._device is None else tensor.cpu(), lambda: None
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        return pinned, self._stream.record_event().synchronize
