"""Copy batches to the device while the previous one is computed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from duoka.hardware.accelerator import has_streams
from duoka.private.torch import tree_leaves, tree_map_only


def to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield the batches on `device`; with streams the next one is copied on its own while one is in use."""
    if device.type == "cpu":
        return batches
    if not has_streams(device):
        return (_to(batch, device) for batch in batches)
    return _prefetch(batches, device)


def _to(batch: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda leaf: leaf.to(device, non_blocking=True), batch)


def _prefetch(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    stream, current = torch.Stream(device), torch.accelerator.current_stream

    def copied() -> Any:
        stream.wait_stream(current(device))  # which may write what the batch is taken from
        with stream:
            for batch in batches:
                return _to(batch, device), stream.record_event()
        return None

    coming = copied()
    while coming is not None:
        batch, there = coming
        current(device).wait_event(there)
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor):
                leaf.record_stream(current(device))  # keeps the memory of all shares until this stream is done
        coming = copied()
        yield batch
