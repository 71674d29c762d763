"""Private parts of torch that a run on one device needs, without importing more than the script does."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from duoka.private import requiring

with requiring("torch", torch.__version__):
    from torch.utils.data import dataloader as _dataloader

    # (owner, name): takes the next batch of every loader. Public: DataLoader.__iter__, whose iterator would be
    # another object.
    NEXT_BATCH = (_dataloader._BaseDataLoaderIter, "__next__")


def not_compiled(function: Any) -> Any:
    """Let the compiler call a function and not trace it. Public: torch.compiler.disable, which imports it."""
    function._torchdynamo_disable = True
    return function


def batch_size_of(iterator: Any) -> int:
    """Return the size of batches of a loader's iterator; 0 if they have none. Public: DataLoader.batch_size."""
    size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", 0)
    return size if isinstance(size, int) else 0


# Returns how many batches were taken from a loader's iterator. Public: none.
batches_taken: Callable[[Any], int] = attrgetter("_num_yielded")


def batches_of(iterator: Any) -> int:
    """Return how many batches a loader's iterator has; 0 if it is not known. Public: len(DataLoader)."""
    if getattr(iterator, "_dataset_kind", None) != _dataloader._DatasetKind.Map:
        return 0  # the length of an iterable dataset may be wrong
    try:
        return len(iterator._index_sampler)
    except (AttributeError, TypeError, NotImplementedError):
        return 0
