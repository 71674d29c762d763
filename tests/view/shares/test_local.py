from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from duoka.collectives.base import OneRank
from duoka.errors import Refused
from duoka.planning.plan import weighted_sizes
from duoka.strategies.exact import Exact
from duoka.view.rules import install
from duoka.view.shares.local import ExactShares, LocalShares
from duoka.view.tensor.batch import BatchTensor, MultiShareBatch
from duoka.view.view import View

install()


def view_of(shares: int) -> View:
    """The view of one process that computes all shares."""
    ranks = OneRank()
    return Exact(ranks, weighted_sizes(shares, [1] * ranks.world_size)).view(ranks, lambda _: None)


def test_all_shares_take_part_in_each_collective() -> None:
    own, seen = ExactShares(OneRank(), (4,)), []

    def work(place: int) -> int:
        first = own.synchronize(lambda parts: (seen.append(parts), [sum(parts)] * 4)[1], place)
        second = own.synchronize(lambda parts: (seen.append(parts), parts[::-1])[1], first + place)
        return second * 10

    assert own.each(work) == [90, 80, 70, 60]
    assert seen == [[0, 1, 2, 3], [6, 7, 8, 9]]


def test_one_share_meets_itself() -> None:
    own: LocalShares
    for own in (LocalShares(OneRank()), ExactShares(OneRank(), (1,))):
        assert own.each(lambda place, own=own: own.synchronize(lambda parts: [sum(parts)], 3)) == [3]  # type: ignore[misc]


def test_an_error_in_a_meeting_is_raised_by_the_share() -> None:
    own, caught, left = ExactShares(OneRank(), (2,)), [], []

    def together(parts: list[Any]) -> list[Any]:
        raise ValueError("no")

    def work(place: int) -> None:
        try:
            own.synchronize(together, None)
        except ValueError as error:
            caught.append(place)
            raise Refused("it was no") from error
        finally:
            left.append(place)

    with pytest.raises(Refused, match="it was no"):
        own.each(work)
    assert caught == [0]
    assert sorted(left) == [0, 1]


def test_a_share_keeps_its_grad_mode() -> None:
    own, seen = ExactShares(OneRank(), (2,)), []

    def work(place: int) -> None:
        with torch.set_grad_enabled(place == 0):
            own.synchronize(lambda parts: (seen.append(torch.is_grad_enabled()), parts)[1], None)
            seen.append(torch.is_grad_enabled())

    own.each(work)
    assert seen == [True, True, False]
    assert torch.is_grad_enabled()


def test_garbage_is_the_same_for_all_shares() -> None:
    own, parameter = ExactShares(OneRank(), (3,)), torch.nn.Parameter(torch.ones(1))
    cycle: list[Any] = [parameter]
    cycle.append(cycle)
    held = ref(parameter)
    del cycle, parameter

    def work(place: int) -> bool:
        if place == 1:
            kept = [[number] for number in range(100_000)]  # many times as much as starts a collection
            del kept
        return held() is None

    assert len({*own.each(work)}) == 1
    assert gc.isenabled()


def test_shares_draw_the_same_numbers() -> None:
    own = ExactShares(OneRank(), (3,))

    def work(place: int) -> tuple[float, float]:
        first = torch.rand(()).item()
        own.synchronize(lambda parts: parts, None)
        return first, torch.rand(()).item()

    torch.manual_seed(1)
    expected = torch.rand(()).item(), torch.rand(()).item(), torch.rand(()).item()
    torch.manual_seed(1)
    assert own.each(work, draws=True) == [expected[:2]] * 3
    assert torch.rand(()).item() == expected[2]


@pytest.fixture
def pair() -> tuple[Tensor, BatchTensor]:
    whole = torch.randn(11, 6, generator=torch.Generator().manual_seed(5))
    return whole.clone(), BatchTensor.of(whole, view_of(4))


def test_a_joint_batch_is_the_whole(pair: tuple[Tensor, BatchTensor]) -> None:
    whole, batch = pair
    assert isinstance(batch, MultiShareBatch)
    assert batch.shape == whole.shape
    assert torch.equal(batch.full_tensor(), whole)
    assert torch.equal(batch.to_local(), whole)
    assert [len(share.to_local()) for share in batch._shares] == [2, 3, 3, 3]
    assert repr(batch) == repr(whole)
    for other in (batch.t(), batch.view(-1), batch.repeat(2, 1), torch.cat([batch, batch])):
        assert isinstance(other, MultiShareBatch)
    assert torch.equal(torch.cat([batch, batch]).to_local(), torch.cat([whole, whole]))
    assert torch.equal(batch.view(-1).full_tensor(), whole.view(-1))


def test_operations_on_all_shares(pair: tuple[Tensor, BatchTensor]) -> None:
    whole, batch = pair
    torch.testing.assert_close(batch.sum(), whole.sum())
    torch.testing.assert_close(batch.std(0), whole.std(0))
    torch.testing.assert_close((batch.t() @ batch), whole.t() @ whole)
    assert (batch > 0).sum().item() == (whole > 0).sum().item()
    assert batch.argmax().item() == whole.argmax().item()
    top, places = batch.topk(2, 1)
    assert torch.equal(top.full_tensor(), whole.topk(2, 1)[0])
    assert torch.equal(places.full_tensor(), whole.topk(2, 1)[1])
    assert torch.equal(batch[torch.arange(11) % 3 == 0], whole[torch.arange(11) % 3 == 0])


def test_recorded_calls_suspend_no_share(pair: tuple[Tensor, BatchTensor], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, batch = pair

    def steps(x: Tensor, number: float) -> Tensor:
        return (x + number).mul(number).tanh().mul_(2)

    for _ in range(3):  # run, record, find the programs of all shares
        steps(batch, 0.5)
    monkeypatch.setattr(batch._spec.view.shares, "each", None)
    assert torch.equal(steps(batch, 1.5).to_local(), steps(whole, 1.5))


def test_shares_draw_the_same_numbers_from_a_generator_of_the_script(pair: tuple[Tensor, BatchTensor]) -> None:
    whole, batch = pair
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for _ in range(2):
        expected, found = (x.sigmoid().bernoulli(generator=g) for x, g in ((whole, one), (batch, other)))
        assert torch.equal(found.full_tensor(), expected)
        (whole * 1).uniform_(generator=one)
        (batch * 1).uniform_(generator=other)
    assert torch.equal(one.get_state(), other.get_state())


def test_what_is_written_is_in_all_shares(pair: tuple[Tensor, BatchTensor]) -> None:
    whole, batch = pair
    row = batch[7]
    row.zero_()
    whole[7] = 0
    batch.mul_(2)
    whole.mul_(2)
    assert torch.equal(row, whole[7])
    batch[batch < 0] = 9
    whole[whole < 0] = 9
    array = batch.numpy()
    array[3, 3] = 100
    whole[3, 3] = 100
    batch.sort(0)
    assert torch.equal(batch.full_tensor(), whole)


def test_gradients_of_all_shares(pair: tuple[Tensor, BatchTensor]) -> None:
    whole, batch = pair
    whole.requires_grad_()
    batch.requires_grad_()
    for x in (whole, batch):
        (x.exp().sum() + (x[2] * x[9]).sum()).backward()
    torch.testing.assert_close(batch.grad.full_tensor(), whole.grad)
    found, expected = (torch.autograd.grad(x.sin().sum(), x)[0] for x in (batch, whole))
    torch.testing.assert_close(found.full_tensor(), expected)
    for x in (whole, batch):
        x.grad = None
        twice = x * 2
        twice.register_hook(lambda grad: grad * 3)
        twice.sin().sum().backward()
    torch.testing.assert_close(batch.grad.full_tensor(), whole.grad)


def test_a_view_with_a_hook_is_not_written_without_its_base(pair: tuple[Tensor, BatchTensor]) -> None:
    twice = pair[1].clone().requires_grad_() * 2
    view = twice[:, :1]
    view.register_hook(lambda grad: grad * 3)
    with pytest.raises(RuntimeError, match="modified inplace"):
        view.mul_(2)
    twice.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        view.sin()


def test_too_large_for_its_rows_is_told_of_the_whole(pair: tuple[Tensor, BatchTensor]) -> None:
    whole, batch = pair
    with pytest.raises(RuntimeError) as expected:
        whole @ torch.ones(5, 5)
    with pytest.raises(RuntimeError) as found:
        batch @ torch.ones(5, 5)
    assert str(found.value) == str(expected.value)
