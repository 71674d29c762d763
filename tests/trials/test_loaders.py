from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from duoka.trials.loaders import watch_loaders
from tests.view.processes import forked


def test_batches_are_seen_on_their_way() -> None:
    def life(_: int) -> Any:
        seen: list[Any] = []
        watch_loaders(lambda loader, batch, is_local: seen.append((loader.batch_size, len(batch[0]), is_local)))
        loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=3)
        first = iter(loader)
        next(first)
        batches = list(loader)
        return seen, len(batches), len(first), hasattr(first, "no_such_thing"), first._num_yielded

    seen, batches, length, strange, yielded = forked(1, life)[0]
    assert seen == [(3, 3, False)] * 3 + [(3, 1, False)]
    assert (batches, length, strange, yielded) == (3, 3, False, 1)
