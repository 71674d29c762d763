"""Draws outside of models: those of one device, to the bit, wherever the batch lies in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from duoka.view.view import View
from tests.view.ranks import in_turns, shared, whole_of


def _drawn(x: Tensor) -> list[Tensor]:
    """One draw after the other, most of them into parts of the same memory."""
    x = x * 1
    found = []
    for draw in (
        lambda: x[:, :, ::2].normal_(),
        lambda: x[:, ::2].uniform_(),
        lambda: x.transpose(1, 2)[:, 1:].bernoulli_(0.5),
        lambda: x.permute(2, 0, 1).normal_(),
        lambda: x.transpose(0, 1).normal_(),
        lambda: x[..., 1].exponential_(),
        lambda: x[0].normal_(),
        lambda: x.data.random_(5),
        lambda: x.new(x.size()).normal_(),
    ):
        draw()
        found.append(x.clone())
    found.append(F.dropout(x.transpose(0, 2), 0.5))
    found.append(torch.randn_like(x.transpose(1, 2)))
    found.append(torch.cat([x, x]).normal_())
    found.append(x.repeat_interleave(3, 0).uniform_())
    found.append(F.rrelu(x - 2, 0.1, 0.3, True, True))
    found.append(torch.normal(x[:, :1], x.abs() + 1))
    found.append(x[:, 0].abs().add(0.1).multinomial(2).double())
    found.append(x[:, 0, 0].abs().add(0.1).multinomial(2).double())
    found.append(torch.poisson(x.abs() * 3))
    for wide in (x[:, :1].expand(-1, 5, -1), x[:, None, 0].expand(-1, 3, -1), x[None].expand(2, -1, -1, -1)):
        found.append(torch.randn_like(wide))
        found.append(torch.rand_like(wide))
        found.append(torch.normal(wide, wide.abs() + 1))
        found.append(torch.bernoulli(wide.sigmoid()))
        found.append(F.dropout(wide, 0.5))
    found.append(F.dropout1d(x[:, 0], 0.5))
    found.append(F.dropout1d(x[:, 0] * 1, 0.5, inplace=True))
    found.append(F.dropout1d(x[:, 0].t(), 0.5))
    found.append(F.dropout1d(x, 0.5))
    found.append(F.dropout2d(x[..., None].transpose(0, 1), 0.5))
    found.append(F.dropout3d(x[:, :, :, None], 0.5))
    found.append(F.dropout3d(x[:, None], 0.5))
    found.append(F.feature_alpha_dropout(x, 0.5, True))
    return found


@pytest.mark.parametrize("size", [3, 16, 20])  # normal_ draws otherwise from 16 numbers on
@pytest.mark.parametrize(("n", "world_size"), [(2, 2), (5, 2), (5, 3), (7, 4)])
def test_draws_are_one_device_s(n: int, world_size: int, size: int) -> None:
    whole = torch.rand(n, 4, size, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    expected = _drawn(whole)
    torch.manual_seed(0)

    def on_rank(view: View) -> list[Tensor]:
        return [whole_of(tensor) for tensor in _drawn(shared(view, whole))]

    for found in in_turns(world_size, on_rank):
        assert [torch.equal(one, other) for one, other in zip(expected, found, strict=True)] == [True] * len(expected)
