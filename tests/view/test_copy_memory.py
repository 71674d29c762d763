"""Writes with a gradient to the memory of a gathered copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.view.view import View
from tests.view.ranks import on_ranks, shared


def test_a_write_with_a_gradient_beside_rows_of_another_view_is_refused() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.arange(20.0).view(5, 4)).requires_grad_() * 1
        row, column = x[0], x[:, 1][0]
        row.mul_(2)  # on one device, the history of `column`, too
        with pytest.raises(Refused, match=r"x\[i\] = value"):
            x.sum()
        del column

    on_ranks(2, on_rank)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x, row: torch.autograd.grad(row.sum() + x.sum(), x),
        lambda x, row: x.register_hook(lambda grad: grad * 3),
        lambda x, row: x.retain_grad(),
    ],
)
def test_the_gradient_of_a_batch_whose_written_rows_are_held_is_refused(ask: Callable[[Tensor, Tensor], Any]) -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.arange(20.0).view(5, 4)).requires_grad_() * 1
        row = x[0]
        row.mul_(2)  # on one device it descends from what x is now, here x from it
        with pytest.raises(Refused, match=r"x\[i\] = value"):
            ask(x, row)
        y = shared(view, torch.arange(20.0).view(5, 4)).requires_grad_() * 1
        y[0].mul_(2)
        ask(y, y)
        z = shared(view, torch.arange(20.0).view(5, 4)).requires_grad_() * 1
        z.retain_grad()
        z[0].mul_(2)
        with pytest.raises(Refused, match="retains"):
            z.sum()

    on_ranks(2, on_rank)


def test_rows_taken_changed_and_put_back_have_a_gradient() -> None:
    def gradient(leaf: Tensor) -> Tensor:
        x = leaf.requires_grad_() * 2
        x[1:3] += 5
        x[0] *= 3
        (found,) = torch.autograd.grad((x**2).sum(), leaf)
        return found

    start = torch.arange(20.0).view(5, 4)
    expected = gradient(start.clone())

    def on_rank(view: View) -> bool:
        return torch.equal(gradient(shared(view, start)).full_tensor(), expected)  # type: ignore[attr-defined]

    assert all(on_ranks(2, on_rank))


@pytest.mark.parametrize("write", [lambda view: view.__setitem__(0, 2.0), lambda view: view[1:].add_(1)])
def test_a_write_to_rows_of_a_view_with_a_hook_is_refused(write: Callable[[Tensor], None]) -> None:
    def on_rank(view: View) -> None:
        x = shared(view, torch.arange(20.0).view(5, 4)).requires_grad_() * 1
        x.register_hook(lambda grad: grad * 3)  # torch calls it: x is no view
        write(x)
        x.sum().backward()
        y = (shared(view, torch.arange(20.0).view(5, 4)).requires_grad_() * 1).view(5, 2, 2)
        y.register_hook(lambda grad: grad * 3)
        with pytest.raises(Refused, match="has a hook"):
            _written(y, write).sum()

    on_ranks(2, on_rank)


def _written(batch: Tensor, write: Callable[[Tensor], None]) -> Tensor:
    write(batch)
    return batch
