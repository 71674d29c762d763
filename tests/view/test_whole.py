from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.view.shares.local import ExactShares
from duoka.view.tensor.batch import BatchTensor, of_share
from duoka.view.view import View, exact_view
from duoka.view.whole import REFUSED, compute_whole
from tests.view.ranks import ThreadRanks, in_turns, on_ranks, shared, whole_of


def whole(n: int = 5) -> Tensor:
    return torch.arange(n * 3.0).view(n, 3) - 4


def double_(x: Tensor, by: Tensor) -> Tensor:
    """No function of torch's: what it writes has to come back."""
    x[0] = 7
    return x.mul_(by)


def test_results_are_one_devices_on_every_rank() -> None:
    def on_rank(view: View) -> Any:
        x = shared(view, whole())
        return compute_whole(torch.linalg.svdvals, (x,), {}), compute_whole(torch.cat, ([x, x],), {"dim": 1})

    for svd, cat in on_ranks(2, on_rank):
        torch.testing.assert_close(svd, torch.linalg.svdvals(whole()))
        torch.testing.assert_close(cat, torch.cat([whole()] * 2, 1))


def test_what_is_written_into_a_batch_is_in_each_ranks_rows() -> None:
    expected = double_(whole(), whole()[:1])

    def on_rank(view: View) -> list[Tensor]:
        x = shared(view, whole())
        rows = x.to_local()
        out = compute_whole(double_, (x, whole()[:1]), {})
        assert out is x
        assert x.to_local().data_ptr() == rows.data_ptr()
        return [whole_of(x), whole_of(shared(view, expected)) - whole_of(x)]

    for found, difference in on_ranks(3, on_rank):
        torch.testing.assert_close(found, expected)
        assert not difference.any()


def test_gradients_come_to_rows() -> None:
    x = whole().requires_grad_()
    torch.linalg.svdvals(x).sum().backward()

    def on_rank(view: View) -> Tensor:
        batch = shared(view, whole()).requires_grad_()
        compute_whole(torch.linalg.svdvals, (batch,), {}).sum().backward()
        return whole_of(batch.grad)

    for grad in on_ranks(2, on_rank):
        torch.testing.assert_close(grad, x.grad)


def test_what_is_computed_whole_is_counted_with_its_name() -> None:
    def on_rank(view: View) -> Any:
        x = shared(view, whole())
        for _ in range(3):
            torch.linalg.svdvals(x)
        return [(name, count) for (name, _), count in view.whole_operations.items()]

    assert on_ranks(2, on_rank) == [[("linalg_svdvals", 3)]] * 2


def test_rows_are_gathered_once_for_who_takes_them_out_one_by_one() -> None:
    def on_rank(view: View) -> int:
        x = shared(view, whole())
        begun = view.ranks.begun
        for row, expected in zip(range(5), whole(), strict=True):
            assert torch.equal(x.select(0, row), expected)
        gathered = view.ranks.begun - begun
        x.add_(1)
        assert torch.equal(x.select(0, 1), whole()[1] + 1)  # gathered anew after a write
        return gathered

    assert on_ranks(2, on_rank) == [1, 1]


@pytest.mark.parametrize("name", ["share_memory_", "register_post_accumulate_grad_hook"])
def test_what_would_be_lost_is_refused(name: str) -> None:
    assert name in REFUSED

    def on_rank(view: View) -> None:
        x = shared(view, whole())
        with pytest.raises(Refused, match=rf"{name} of a batch cannot be split over ranks \(test_whole.py:\d+\)"):
            getattr(x, name)(*([] if name == "share_memory_" else [print]))

    on_ranks(2, on_rank)


def test_a_change_of_shape_in_place_is_refused() -> None:
    def on_rank(view: View) -> None:
        x = shared(view, whole(6))
        with pytest.raises(Refused, match=r"resize_ at test_whole.py:\d+ would change a batch's shape"):
            compute_whole(Tensor.resize_, (x, (2, 3)), {})

    on_ranks(2, on_rank)


@pytest.mark.parametrize("world_size", [1, 2])
def test_of_several_shares_of_one_process(world_size: int) -> None:
    """All shares at once, or each share by itself, as in a rule: the same."""

    def on_rank(one: View) -> Any:
        assert isinstance(one.ranks, ThreadRanks)
        shares = ExactShares(one.ranks, {1: (4,), 2: (3, 1)}[world_size])
        view = exact_view(shares, lambda _: None, lambda _, leaf: leaf, print)
        x = BatchTensor.of(whole(8), view)
        together = compute_whole(torch.linalg.svdvals, (x,), {})
        own = view.shares
        apart = own.each(lambda place: compute_whole(torch.linalg.svdvals, of_share((x,), place), {}))
        written = compute_whole(double_, (x, whole()[:1]), {})
        assert written is x
        return together, apart, x.full_tensor()

    for together, apart, written in in_turns(world_size, on_rank):
        for found in (together, *apart):
            torch.testing.assert_close(found, torch.linalg.svdvals(whole(8)))
        torch.testing.assert_close(written, double_(whole(8), whole()[:1]))
