"""Compressed gradients: their error, which is added to later gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import duoka
from duoka.collectives.base import Collectives
from duoka.strategies.compress import COMPRESSIONS, Compression, PowerSgd, compression
from duoka.view.view import View
from tests.run.ranks import on_ranks as on_processes
from tests.view.ranks import on_ranks

SHAPES = [torch.Size([16, 24]), torch.Size([24]), torch.Size([4, 4, 3, 3])]


class Counted:
    """Collectives that count what they are given to sum."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks, self.rank, self.world_size = ranks, ranks.rank, ranks.world_size
        self.sent = 0

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        self.sent += tensor.numel() * tensor.element_size()
        return self._ranks.start_all_reduce(tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.start_all_reduce(tensor)()
        return tensor


def gradients(rank: int, step: int) -> Tensor:
    """A rank's part of a mean: of low rank, and something of every other."""
    own = torch.Generator().manual_seed(100 * step + rank)
    parts = []
    for shape in SHAPES:
        columns = shape[1:].numel()
        low = torch.outer(torch.arange(float(shape[0])) + 1, torch.arange(float(columns)) + 1).flatten()
        parts.append(low / low.norm() + 0.05 * torch.randn(shape.numel(), generator=own))
    return torch.cat(parts)


def summed(kind: Callable[[], Compression], steps: int, ranks: int = 2) -> list[Any]:
    """For each rank: the sums of some steps, the true ones, and the bytes that the last one took."""

    def work(view: View) -> Any:
        one, counted = kind(), Counted(view.ranks)
        found, true = [], []
        for step in range(steps):
            counted.sent = 0
            flat = gradients(view.ranks.rank, step)
            one(flat, [0, 1, 2], SHAPES, counted)()  # type: ignore[arg-type]
            found.append(flat)
            true.append(torch.stack([gradients(rank, step) for rank in range(ranks)]).sum(0))
        return torch.stack(found), torch.stack(true), counted.sent

    return on_ranks(ranks, work)


@pytest.mark.parametrize(("word", "near", "part"), [("none", 0, 1), ("bf16", 0.05, 0.5), ("fp16", 0.01, 0.5)])
def test_each_gradient_is_near(word: str, near: float, part: float) -> None:
    for found, true, sent in summed(lambda: compression(word), 2):
        assert (found - true).norm() <= near * true.norm()
        assert sent == part * sum(shape.numel() for shape in SHAPES) * 4


def test_powersgd_sends_little_and_gives_back_what_it_left_out() -> None:
    (found, true, sent), (other, *_) = summed(lambda: PowerSgd(rank=1, after=0), 30)
    assert torch.equal(found, other)  # on all ranks
    assert sent == 4 * ((16 + 24) + 24 + (4 + 36))
    vector = slice(16 * 24, 16 * 24 + 24)
    torch.testing.assert_close(found[:, vector], true[:, vector])  # no matrix: as it is
    assert (found[0] - true[0]).norm() < 0.6 * true[0].norm()


def test_what_powersgd_leaves_out_stays_with_the_ranks() -> None:
    def work(view: View) -> Any:
        one, given, found = PowerSgd(rank=2, after=0), torch.zeros(8, 9), torch.zeros(8, 9)
        for step in range(5):
            flat = torch.randn(72, generator=torch.Generator().manual_seed(10 * step + view.ranks.rank))
            given += flat.view(8, 9)
            one(flat, [0], [torch.Size([8, 9])], view.ranks)()
            found += flat.view(8, 9)
        return given - one._lost[0], found

    (of_one, found), (of_other, _) = on_ranks(2, work)
    torch.testing.assert_close(of_one + of_other, found, rtol=1e-4, atol=1e-4)


def test_powersgd_begins_after_a_while() -> None:
    found, true, _ = summed(lambda: PowerSgd(rank=1, after=3), 4)[0]
    torch.testing.assert_close(found[:3], true[:3])
    assert not torch.allclose(found[3], true[3])


def test_powersgd_recovers_from_a_gradient_that_overflowed() -> None:
    def work(view: View) -> Any:
        one, shapes = PowerSgd(rank=1, after=0), [torch.Size([8, 8])]
        for step in range(3):
            flat = torch.outer(torch.ones(8), torch.arange(8.0)).flatten() * (float("inf") if step == 1 else 1.0)
            one(flat, [0], shapes, view.ranks)()
        return flat

    for flat in on_ranks(2, work):
        torch.testing.assert_close(flat, torch.outer(torch.ones(8), torch.arange(8.0)).flatten() * 2)


def test_a_model_learns_with_it() -> None:
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(1))
    y = x @ torch.randn(24, 4, generator=torch.Generator().manual_seed(2))

    def work(run: duoka.Run) -> list[float]:
        model = run.model(nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(10):
            for rows, targets in run.loader((x, y), batch_size=32):
                loss = (model(rows) - targets).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        return losses

    one, other = on_processes(2, work, compress="powersgd:1:3")
    assert one == other
    assert one[-1] < 0.5 * one[0]


@pytest.mark.parametrize("word", ["power", "bf16:2", "powersgd:0", "powersgd:x", "powersgd:1:2:3", "", "fp32"])
def test_names_that_are_wrong(word: str) -> None:
    with pytest.raises(duoka.OptionError, match="compress must be one of none, bf16, fp16, powersgd"):
        duoka.start(compress=word)


def test_every_kind_is_tested() -> None:
    assert set(COMPRESSIONS) == {"none", "bf16", "fp16", "powersgd"}
