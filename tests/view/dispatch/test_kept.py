from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.view import View
from tests.view.ranks import on_ranks, shared


def numbers() -> Tensor:
    return torch.arange(24.0).view(6, 4)


def set_rows(x: Tensor) -> Any:
    for i in range(6):
        x[i] = x[i] * i
        x[i, 1] -= 2
        x[i, 2:] = x[-1 - i, :2]
    return x.sum().item()


def add_losses(x: Tensor) -> Any:
    out = x * torch.ones(4, requires_grad=True)
    losses = [F.cross_entropy(out[i : i + 1], torch.tensor([i % 4])) * i for i in range(6)]
    return [sum(losses).item(), *(out[i, ..., None].sum().item() for i in torch.arange(6))]  # type: ignore[union-attr]


def write_in_turn(x: Tensor) -> Any:
    found, flat = [], x.view(-1)
    for i in range(6):
        x[i] = i
        flat[i] += 1
        found += [x[i].sum().item(), flat[0].item(), x.sum().item()]
    return found


def write_between(x: Tensor) -> Any:
    found = []
    for i in range(6):
        found.append(x[i].sum().item())
        x.add_(1)
        x[:, 0] = i
        found.append(x[5 - i].sum().item())
    return found


def write_by_numpy(x: Tensor) -> Any:
    flat = x.view(-1)
    found = [flat[4].item(), x[1].sum().item()]
    row = x[0].numpy()
    row[:] = 9
    found.append(x.sum().item())
    del row
    return [*found, x.sum().item(), flat[0].item(), x[0, 1].item()]


def hold_an_array(x: Tensor) -> Any:
    array = x.numpy()
    for i in range(6):
        x[i, :2] *= i
        x[1:3] += 1
    return [array.sum(), x.sum().item()]


LOOPS: list[Callable[[Tensor], Any]] = [
    set_rows, add_losses, write_in_turn, write_between, write_by_numpy, hold_an_array
]  # fmt: skip


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_over_rows_gives_what_one_device_gives(loop: Callable[[Tensor], Any], inference: bool) -> None:
    def values(x: Tensor) -> Any:
        with torch.inference_mode(inference):
            return np.asarray(loop(x * 1)).tolist()

    expected = values(numbers())
    for found in on_ranks(2, lambda view: values(shared(view, numbers()))):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_loop_that_assigns_rows_gathers_once_and_counts_what_it_takes() -> None:
    def on_rank(view: View) -> tuple[int, int]:
        x, y = shared(view, numbers()), shared(view, torch.zeros(6, 4))
        for i in range(6):
            y[i] = x[i]
            y[i, 1] += x[i, 1]
        begun, met = view.ranks.begun, view.interactions
        assert torch.equal(y.full_tensor(), numbers() * torch.tensor([1.0, 2, 1, 1]))  # type: ignore[attr-defined]
        return begun, met

    for begun, met in on_ranks(2, on_rank):
        assert begun == 2  # of each batch once
        assert met >= 4 * 6
