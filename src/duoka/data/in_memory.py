"""Batches of a TensorDataset, or of a subset of one, by one indexing of each tensor instead of one for each sample.

The values are those of `default_collate([dataset[index] for index in indices])`, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, get_worker_info

_GETITEM = {kind: kind.__getitem__ for kind in (TensorDataset, Subset)}


def read(dataset: Any, indices: Sequence[Any]) -> list[Tensor] | None:
    """Return the samples at `indices`, stacked; None if they have to be read and collated one by one.

    A loader worker reads one by one: default_collate writes into memory that the worker shares with its loader.
    """
    if get_worker_info() is not None or not all(type(index) is int for index in indices):
        return None
    try:
        while type(dataset) is Subset and Subset.__getitem__ is _GETITEM[Subset]:
            dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
        if type(dataset) is not TensorDataset or TensorDataset.__getitem__ is not _GETITEM[TensorDataset]:
            return None
        if not all(type(tensor) is Tensor and _is_plain(tensor) for tensor in dataset.tensors):
            return None
        if not indices or not 0 <= min(indices) <= max(indices) < len(dataset):
            return None  # negative ones count from the end; an error of an index on a GPU ends its process
        rows = torch.tensor(indices, dtype=torch.long, device="cpu")
        # index_select copies whole rows; tensor[rows] takes several times as long, in all threads.
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in dataset.tensors]
    except IndexError:  # reading one by one names the sample
        return None


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.is_contiguous()  # else the batch's strides would differ from those of a stack
        and not tensor.requires_grad
        and not tensor.is_quantized
    )
