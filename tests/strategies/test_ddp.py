from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from duoka.collectives.base import OneRank
from duoka.errors import RanksApart, Refused
from duoka.planning.options import RunSettings
from duoka.strategies import Ddp, create
from duoka.view.view import View
from tests.view.ranks import in_turns, on_ranks

SITE = "train.py:7"
BYTES = [1, 40, 10**9]  # every gradient by itself, a few together, all together


def with_ddp(world_size: int, work: Callable[[Ddp, int], Any], **how: Any) -> list[Any]:
    def on_rank(view: View) -> Any:
        return work(Ddp(view.ranks, **how), view.ranks.rank)

    return on_ranks(world_size, on_rank)


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(float(size)).to(dtype)) for size in sizes]


def backward(ddp: Ddp, loss: Tensor, site: str = SITE) -> None:
    with ddp.backward(site):
        loss.backward()


def weighted(chosen: list[Any], weight: float) -> Tensor:
    """A loss whose gradient is `weight` everywhere, for these parameters."""
    return torch.stack([parameter.float().sum() for parameter in chosen]).sum() * weight


def grads(found: list[nn.Parameter]) -> list[Any]:
    return [None if p.grad is None else p.grad.flatten()[0].item() for p in found]


def test_parameters_become_rank_0_s() -> None:
    def work(ddp: Ddp, rank: int) -> Any:
        parameter = nn.Parameter(torch.full((2, 3), float(rank)).t())  # laid out otherwise
        ddp.adopt(parameter)
        ddp.adopt(parameter)
        return parameter.tolist()

    assert with_ddp(3, work) == [[[0, 0]] * 3] * 3


def test_what_is_no_leaf_is_not_adopted() -> None:
    def work(ddp: Ddp, rank: int) -> Any:
        leaf = torch.full((2,), float(rank), requires_grad=True)
        ddp.adopt(leaf * 2)
        return leaf.tolist()

    assert with_ddp(2, work) == [[0, 0], [1, 1]]


@pytest.mark.parametrize("bucket_bytes", BYTES)
def test_gradients_are_averaged_and_accumulate(bucket_bytes: int) -> None:
    def work(ddp: Ddp, rank: int) -> Any:
        some = parameters(3, 5, 7)
        for parameter in some:
            ddp.adopt(parameter)
        found = []
        for weight in (1.0, 10.0, 100.0):
            backward(ddp, weighted(some, weight * (rank + 1)))
            found.append(grads(some))
        for parameter in some:
            parameter.grad = None
        backward(ddp, weighted(some, rank))
        return [*found, grads(some)]

    assert with_ddp(2, work, bucket_bytes=bucket_bytes) == [[[1.5] * 3, [16.5] * 3, [166.5] * 3, [0.5] * 3]] * 2


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    world_size=st.integers(2, 3),
    bucket_bytes=st.sampled_from(BYTES),
    sites=st.integers(1, 2),
)
def test_any_parameters_in_any_order_on_any_rank(seed: int, world_size: int, bucket_bytes: int, sites: int) -> None:
    """Each pass reaches other parameters, on each rank others; some start again without a gradient."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 12) for _ in range(6)]
    kinds = [draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]) for _ in sizes]
    passes = [
        (
            f"train.py:{draw.randrange(sites)}",
            [draw.sample(range(6), draw.randint(1, 6)) for _ in range(world_size)],
            [draw.randint(1, 8) for _ in range(world_size)],
            draw.sample(range(6), draw.choice([0, 0, 6, 2])),
        )
        for _ in range(6)
    ]
    expected: list[Any] = []
    now: list[Any] = [None] * 6
    for _, chosen, weights, dropped in passes:
        for index in range(6):
            parts = [weight for some, weight in zip(chosen, weights, strict=True) if index in some]
            if parts:
                now[index] = (now[index] or 0) + sum(parts) / world_size
        expected.append(list(now))
        for index in dropped:
            now[index] = None

    def work(ddp: Ddp, rank: int) -> Any:
        some = [nn.Parameter(torch.zeros(size, dtype=kind)) for size, kind in zip(sizes, kinds, strict=True)]
        for parameter in some:
            ddp.adopt(parameter)
        found = []
        for site, chosen, weights, dropped in passes:
            backward(ddp, weighted([some[index] for index in chosen[rank]], weights[rank]), site)
            found.append(grads(some))
            assert all(p.grad is None or bool((p.grad == p.grad[0]).all()) for p in some)
            for index in dropped:
                some[index].grad = None
        return found

    for found in with_ddp(world_size, work, bucket_bytes=bucket_bytes):
        for one, other in zip(found, expected, strict=True):
            assert one == [value if value is None else pytest.approx(value, rel=2e-2) for value in other]


@pytest.mark.parametrize("bucket_bytes", BYTES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_used_several_times(bucket_bytes: int, reentrant: bool) -> None:
    """With reentrant checkpoints its gradient arrives several times, after its bucket has left."""

    def run(layer: Any, last: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(3):
            x = checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=reentrant)
        return last(x).pow(2).sum()

    def layers() -> Any:
        torch.manual_seed(0)
        return nn.Linear(3, 3), nn.Linear(3, 2)

    data = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
    one, other = layers()
    (sum(run(one, other, x) for x in data) / 2).backward()
    expected = [p.grad for part in (one, other) for p in part.parameters()]

    def on_rank(view: View) -> list[Any]:
        ddp = Ddp(view.ranks, bucket_bytes=bucket_bytes)
        one, other = layers()
        some = [p for part in (one, other) for p in part.parameters()]
        for parameter in some:
            ddp.adopt(parameter)
        for _ in range(3):
            for parameter in some:
                parameter.grad = None
            backward(ddp, run(one, other, data[view.ranks.rank]))
        return [p.grad for p in some]

    for found in in_turns(2, on_rank):
        torch.testing.assert_close(found, expected)


def test_a_frozen_parameter_is_averaged_once_it_is_thawed() -> None:
    def work(ddp: Ddp, rank: int) -> Any:
        some = parameters(3, 4)
        some[0].requires_grad_(False)
        for parameter in some:
            ddp.adopt(parameter)
        backward(ddp, weighted(some, rank))
        first = grads(some)
        some[0].requires_grad_(True)
        for _ in range(2):
            backward(ddp, weighted(some, rank))
        second = grads(some)
        some[0].requires_grad_(False)
        backward(ddp, weighted(some, rank))
        return first, second, grads(some)

    assert with_ddp(2, work) == [([None, 0.5], [1.0, 1.5], [1.0, 2.0])] * 2


def test_passes_at_one_line_reach_other_parameters_in_turn() -> None:
    """Two models trained by the same function, one after the other."""

    def work(ddp: Ddp, rank: int) -> Any:
        first, second = parameters(3, 4), parameters(5)
        for parameter in (*first, *second):
            ddp.adopt(parameter)
        for step in range(3):
            backward(ddp, weighted(first, rank + step))
            backward(ddp, weighted(second, 10 * rank))
        return grads(first), grads(second)

    assert with_ddp(2, work, bucket_bytes=1) == [([4.5, 4.5], [15.0])] * 2


def test_deleted_parameters_are_forgotten() -> None:
    def work(ddp: Ddp, rank: int) -> Any:
        some = parameters(3, 4, 5)
        for parameter in some:
            ddp.adopt(parameter)
        backward(ddp, weighted(some, rank))
        del some[1], parameter
        gc.collect()
        more = parameters(6)[0]
        ddp.adopt(more)
        backward(ddp, weighted([*some, more], rank))
        return grads([*some, more])

    assert with_ddp(2, work) == [[1.0, 1.0, 0.5]] * 2


def test_a_gradient_that_was_replaced_is_taken_as_it_is() -> None:
    def work(ddp: Ddp, rank: int) -> Any:
        some = parameters(3)
        ddp.adopt(some[0])
        backward(ddp, weighted(some, rank))
        some[0].grad = torch.full((3,), 4.0)
        backward(ddp, weighted(some, rank))
        before = some[0].grad
        backward(ddp, weighted(some, rank))
        return grads(some), before is some[0].grad

    assert with_ddp(2, work) == [([5.0], True)] * 2


def test_sparse_gradients_are_averaged_and_accumulate() -> None:
    def passes(sparse: bool) -> list[Any]:
        def work(ddp: Ddp, rank: int) -> Any:
            table, bag = nn.Embedding(6, 2, sparse=sparse), nn.EmbeddingBag(3, 1, mode="sum", sparse=sparse)
            dense = nn.Linear(2, 1)
            for parameter in (table.weight, bag.weight, *dense.parameters()):
                ddp.adopt(parameter)
            found = []
            for step in range(5):
                used = rank <= step != 3  # not by every rank, then by none
                lost = table(torch.tensor([rank, step, step])).sum() * (1 + rank) if used else torch.zeros(())
                lost = lost + (bag(torch.tensor([[rank, 2]])).sum() if step in (2, 4) else 0.0)
                before = table.weight.grad
                backward(ddp, lost + dense.weight.sum() * rank)
                assert before is None or table.weight.grad is before  # the script may hold it
                grads = [table.weight.grad, bag.weight.grad, dense.weight.grad]
                assert all(grad is None or grad.is_sparse == sparse for grad in grads[:2])
                found.append([None if grad is None else grad.to_dense().tolist() for grad in grads])
                if step == 1:
                    table.weight.grad = None
            return found

        return with_ddp(2, work)

    assert passes(sparse=True) == passes(sparse=False)


class _Many(OneRank):
    """So many ranks, which all have the same."""

    world_size = 301

    def start_all_reduce(self, tensor: Tensor, op: Any = None) -> Callable[[], None]:
        tensor.mul_(self.world_size)
        return lambda: None

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack([tensor] * self.world_size)


def test_the_report_of_many_ranks_is_exact() -> None:
    ddp, some = Ddp(_Many(), rng_digest=lambda: 65535), parameters(3)
    ddp.adopt(some[0])
    for _ in range(2):
        backward(ddp, weighted(some, 2.0))
    assert grads(some) == [4.0]


def test_a_gradient_that_is_sparse_on_some_ranks_alone_is_refused() -> None:
    def work(ddp: Ddp, rank: int) -> None:
        weight = nn.Parameter(torch.ones(4, 2))
        ddp.adopt(weight)
        with pytest.raises(Refused, match="sparse on some ranks"):
            backward(ddp, F.embedding(torch.tensor([1]), weight, sparse=rank == 1).sum())

    with_ddp(2, work)


def test_a_pass_that_nobody_announced_is_refused() -> None:
    def work(ddp: Ddp, rank: int) -> None:
        some = parameters(3)
        ddp.adopt(some[0])
        with pytest.raises(Refused, match="outside"):
            weighted(some, 1).backward()

    with_ddp(2, work)


def test_a_pass_that_raised_is_forgotten() -> None:
    def work(ddp: Ddp, rank: int) -> Any:
        some = parameters(3)
        ddp.adopt(some[0])
        with pytest.raises(RuntimeError, match="scalar"):
            backward(ddp, some[0] * 2)
        backward(ddp, weighted(some, rank))
        return grads(some)

    assert with_ddp(2, work) == [[0.5]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_numbers_that_went_apart_are_noticed(dtype: torch.dtype) -> None:
    def on_rank(view: View) -> None:
        ddp = create(RunSettings(strategy="ddp"), view.ranks)
        assert isinstance(ddp, Ddp)
        some = parameters(3, dtype=dtype)
        ddp.adopt(some[0])
        for _ in range(2):
            torch.rand(5)
            backward(ddp, weighted(some, 1))
        if view.ranks.rank:
            torch.rand(5)
        with pytest.raises(RanksApart, match="random states differ"):
            backward(ddp, weighted(some, 1))

    in_turns(2, on_rank)
