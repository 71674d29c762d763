from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from duoka.view.rules.batch_norm import Running, whole_batch_norm
from duoka.view.view import View
from tests.view.ranks import on_ranks, shared

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2}


def inputs(n: int, spatial: tuple[int, ...], dtype: torch.dtype, affine: bool, seed: int, shift: float = 2.0) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weight, bias = (normal(3).to(dtype), normal(3).to(dtype)) if affine else (None, None)
    return (normal(n, 3, *spatial) * 3 + shift).to(dtype), weight, bias


def statistics(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 3, dtype=dtype), torch.linspace(1, 2, 3, dtype=dtype)


def scalar(out: Tensor) -> Tensor:
    weights = torch.arange(1.0, out.numel() + 1, dtype=torch.float64).view(out.shape) / out.numel()
    return (out.double() * weights).sin().sum()


def gradients(loss: Tensor, leaves: list[Tensor], twice: bool) -> tuple[Any, Any]:
    first = torch.autograd.grad(loss, leaves, create_graph=twice, allow_unused=True)
    if not twice:
        return first, ()
    return first, torch.autograd.grad(penalty(first), leaves, allow_unused=True)


def penalty(grads: Any) -> Tensor:
    return torch.stack([(grad.double() ** 2).sum() for grad in grads]).sum()


def one_device(x: Tensor, weight: Any, bias: Any, momentum: float, eps: float, twice: bool) -> Any:
    running = statistics(x.dtype)
    leaves = [leaf.clone().requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    x, *affine = leaves
    out = F.batch_norm(x, *running, *(affine or (None, None)), training=True, momentum=momentum, eps=eps)
    first, second = gradients(scalar(out), leaves, twice)
    return out.detach(), running, first, second


def on_one_rank(view: View, x: Tensor, weight: Any, bias: Any, momentum: float, eps: float, twice: bool) -> Any:
    """The same of a share; gradients as the leaves have them when ranks are summed and divided by their number."""
    size = view.ranks.world_size
    running = statistics(x.dtype)
    rows = shared(view, x)
    spec = rows._spec
    leaves = [leaf.clone().requires_grad_() for leaf in (rows.to_local(), weight, bias) if leaf is not None]
    own, *affine = leaves
    counts = torch.tensor(spec.partition.sizes) * (x.numel() // len(x) // 3)
    w, b = affine or (None, None)
    [out] = whole_batch_norm([(own, w, b)], Running(*running, momentum, eps), counts, view.shares)
    weights = (torch.arange(1.0, x.numel() + 1, dtype=torch.float64).view(x.shape) / x.numel()).split(
        spec.partition.sizes
    )
    loss = view.all_sum((out.double() * weights[view.ranks.rank]).sin().sum())
    first = torch.autograd.grad(loss, leaves, create_graph=twice)
    true = [first[0] / size, *(view.all_sum(grad) / size for grad in first[1:])]
    second: list[Tensor] = []
    if twice:
        parts = (true[0].double() ** 2).sum()
        total = view.all_sum(parts) + sum((grad.double() ** 2).sum() for grad in true[1:])
        found = torch.autograd.grad(total, leaves)
        second = [spec.gather(found[0]) / size, *(view.all_sum(grad) / size for grad in found[1:])]
    return spec.gather(out.detach()), running, [spec.gather(true[0]), *true[1:]], second


@settings(max_examples=25)
@given(
    partition=st.integers(2, 4).flatmap(lambda size: st.tuples(st.integers(size, 13), st.just(size))),
    spatial=st.sampled_from([(), (5,), (2, 3)]),
    affine=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    momentum=st.sampled_from([0.1, 1.0, 0.0]),
    seed=st.integers(0, 99),
)
@example(partition=(5, 4), spatial=(), affine=True, dtype=torch.float64, momentum=0.3, seed=0)
def test_one_device_s(
    partition: tuple[int, int], spatial: tuple[int, ...], affine: bool, dtype: torch.dtype, momentum: float, seed: int
) -> None:
    given_ = inputs(partition[0], spatial, dtype, affine, seed)
    twice = dtype == torch.float64
    expected = one_device(*given_, momentum, 1e-3, twice)
    exact = one_device(*(None if one is None else one.double() for one in given_), momentum, 1e-3, twice)
    for found in on_ranks(partition[1], lambda view: on_one_rank(view, *given_, momentum, 1e-3, twice)):
        assert found[0].dtype == dtype
        values = [(result[0], *result[1], *result[2], *result[3]) for result in (found, expected, exact)]
        for one, other, truth in zip(*values, strict=True):
            largest = max(1.0, float(other.detach().abs().max()))  # sums of few bits cancel out
            rounding = float((other.double() - truth).detach().abs().max())  # one device's own
            atol = TOLERANCE[dtype] * largest + 2 * rounding
            torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=atol)


def test_double_precision_is_kept() -> None:
    given_ = inputs(5, (), torch.float64, True, 0)
    expected = one_device(*given_, 0.3, 1e-3, False)
    for found in on_ranks(4, lambda view: on_one_rank(view, *given_, 0.3, 1e-3, False)):
        torch.testing.assert_close(found[:3], (*expected[:2], [*expected[2]]), rtol=1e-12, atol=1e-12)


def test_a_large_mean_does_not_drown_the_variance() -> None:
    x, weight, bias = inputs(12, (), torch.float32, True, 0, shift=1e4)
    expected = one_device(x, weight, bias, 0.1, 1e-5, False)
    for found in on_ranks(3, lambda view: on_one_rank(view, x, weight, bias, 0.1, 1e-5, False)):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


def test_no_running_statistics() -> None:
    x = inputs(6, (), torch.float64, False, 0)[0]
    expected = F.batch_norm(x, None, None, training=True)

    def on_rank(view: View) -> Tensor:
        rows = shared(view, x)
        counts = torch.tensor(rows._spec.partition.sizes)
        running = Running(None, None, 0.1, 1e-5)
        [out] = whole_batch_norm([(rows.to_local(), None, None)], running, counts, view.shares)
        return rows._spec.gather(out)

    for found in on_ranks(2, on_rank):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_first_layer_over_data_can_be_differentiated_twice(frozen: bool) -> None:
    """Data needs no gradient, and a frozen weight neither."""
    x, weight, bias = inputs(6, (), torch.float64, True, 0)

    def penalised(weight: Tensor, bias: Tensor, out: Tensor) -> Tensor:
        return (torch.autograd.grad(out, bias, create_graph=True)[0] ** 2).sum() + out

    def leaves() -> tuple[Tensor, Tensor]:
        return weight.clone().requires_grad_(not frozen), bias.clone().requires_grad_()

    w, b = leaves()
    loss = scalar(F.batch_norm(x, None, None, w, b, True))
    expected = torch.autograd.grad(penalised(w, b, loss), b)[0]

    def on_rank(view: View) -> Tensor:
        w, b = leaves()
        rows = shared(view, x)
        counts = torch.tensor(rows._spec.partition.sizes)
        [out] = whole_batch_norm([(rows.to_local(), w, b)], Running(None, None, 0.1, 1e-5), counts, view.shares)
        weights = (torch.arange(1.0, x.numel() + 1, dtype=torch.float64).view(x.shape) / x.numel()).split(
            rows._spec.partition.sizes
        )
        loss = view.all_sum((out * weights[view.ranks.rank]).sin().sum())
        first = view.all_sum(torch.autograd.grad(loss, b, create_graph=True)[0]) / view.ranks.world_size
        found = torch.autograd.grad((first**2).sum() + loss, b)[0]
        return view.all_sum(found) / view.ranks.world_size

    for found in on_ranks(2, on_rank):
        torch.testing.assert_close(found, expected)
