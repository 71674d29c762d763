from __future__ import annotations

import numpy as np
import torch

from duoka.forecasting.memory_recorder import Storages


def test_storages_count_once_and_until_they_are_freed() -> None:
    with Storages() as live:
        x = torch.zeros(100)
        assert live.total == 400
        view = x.view(10, 10).t()
        assert live.total == 400  # of the same storage
        y = x + 1
        assert live.total == 800
        del x, y
        assert live.total == 400  # the view has the first
        del view
        assert (live.total, live.peak) == (0, 800)


def test_what_the_graph_keeps_is_alive() -> None:
    weight = torch.zeros(50, requires_grad=True)
    with Storages() as live:
        loss = (weight * 2).exp().sum()
        assert live.total == 200 + 4  # exp keeps its result
        loss.backward()
        del loss
        assert live.total == 200  # the gradient
        weight.grad = None
        assert live.total == 0


def test_a_resized_storage() -> None:
    with Storages() as live:
        x = torch.zeros(10)
        x.resize_(1000)
        assert live.total == 4000
        del x
        assert live.total == 0


def test_memory_of_others_does_not_count() -> None:
    array = np.zeros(100)
    with Storages() as live:
        x = torch.from_numpy(array).view(10, 10)
        torch.zeros(10, device="meta")
        assert live.total == 0
        assert x.numel() == 100


def test_lists_of_tensors() -> None:
    with Storages() as live:
        torch._foreach_add_([torch.zeros(10)], [torch.zeros(10)])
        out = torch.max(torch.zeros(4, 5), 1)
        assert live.total == 4 * 4 + 4 * 8  # values, and indices
        del out
