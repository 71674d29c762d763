"""Real processes, over gloo alone and with memory in common."""

from __future__ import annotations

import os
import time
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from duoka.collectives import base
from duoka.collectives.base import IsolatedRank
from duoka.collectives.process import ProcessCollectives
from duoka.errors import PeerLost, RanksApart, Refused, TimedOut
from duoka.view.shares.differentiable import AllReduceSum
from duoka.view.shares.local import LocalShares
from tests.view.processes import GONE, all_well, in_processes

pytestmark = pytest.mark.parametrize("nearby", [False, True], ids=["gloo", "nearby"])

SHAPES = [(), (1,), (5,), (3, 4), (600, 600)]  # the last is too large for the memory in common
DTYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16]


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(rank)) * 100 - 50).to(dtype)


def test_it_is_counted_how_long_a_rank_waits(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> float:
        time.sleep(0.5 * ranks.rank)
        ranks.barrier()
        return ranks._slot.waited  # type: ignore[attr-defined]

    early, late = all_well(in_processes(2, work, nearby=nearby))
    assert early > late > 0


def test_types_that_gloo_does_not_send(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> None:
        for dtype in (torch.complex64, torch.complex128, torch.int16):
            one = torch.arange(1, 5).to(dtype)
            own = one if ranks.rank == 0 else one.flip(0)
            assert ranks.all_gather(own).tolist() == [one.tolist(), one.tolist()[::-1]]
            assert ranks.broadcast(own.clone(), 1).tolist() == one.tolist()[::-1]
            received = torch.stack([one.view(2, 2)[ranks.rank], one.flip(0).view(2, 2)[ranks.rank]])
            assert ranks.start_all_to_all(own.view(2, 2))().tolist() == received.tolist()
            assert ranks.all_reduce(own.clone()).tolist() == [5] * 4
        conjugate = torch.complex(torch.ones(2), torch.ones(2)).conj()
        assert ranks.all_gather(conjugate).tolist() == [[1 - 1j] * 2] * 2
        assert ranks.all_gather(torch.empty(0, dtype=torch.complex64)).shape == (2, 0)

    all_well(in_processes(2, work, nearby=nearby))


@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_are_combined(nearby: bool, world_size: int) -> None:
    names = {ReduceOp.SUM: "sum", ReduceOp.MAX: "amax", ReduceOp.MIN: "amin"}

    def work(ranks: ProcessCollectives) -> list[Tensor]:
        found = []
        for shape in SHAPES:
            for dtype in DTYPES if len(shape) < 2 else DTYPES[:1]:
                for op, name in names.items():
                    given = value(ranks.rank, shape, dtype)
                    total = ranks.all_reduce(given.clone(), op)
                    every = torch.stack([value(rank, shape, dtype) for rank in range(world_size)])
                    torch.testing.assert_close(total, getattr(every, name)(0).to(dtype), rtol=2e-2, atol=1)
                    if name != "sum" or dtype == torch.int64:
                        assert torch.equal(total, getattr(every, name)(0).to(dtype))
                    found.append(total)
        return found

    first, *others = all_well(in_processes(world_size, work, nearby=nearby))
    for other in others:  # the same bits
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_tensors_are_gathered(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> None:
        for shape in [*SHAPES, (0, 3)]:
            for dtype in [*DTYPES, torch.uint8] if shape != SHAPES[-1] else DTYPES[:1]:
                found = ranks.all_gather(value(ranks.rank, shape, dtype))
                assert torch.equal(found, torch.stack([value(rank, shape, dtype) for rank in range(3)]))
        turned = ranks.all_gather(value(ranks.rank, (3, 4), torch.float32).t())
        assert torch.equal(turned[1], value(1, (3, 4), torch.float32).t())

    assert in_processes(3, work, nearby=nearby) == [None] * 3


def test_tensors_and_objects_are_sent_from_any_rank(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> str:
        for source in range(2):
            for shape in SHAPES:
                tensor = value(ranks.rank, shape, torch.float32)
                assert ranks.broadcast(tensor, source) is tensor
                assert torch.equal(tensor, value(source, shape, torch.float32))
            for sent in (None, {"a": [1, source]}, ValueError("no"), b"x" * (3 << 20), "", os.getpid()):
                own = sent if ranks.rank == source else "something else"
                found = ranks.broadcast_object(own, source)
                assert type(found) is type(sent)
                assert ranks.rank == source or isinstance(sent, (int, Exception)) or found == sent
        return "well"

    assert in_processes(2, work, nearby=nearby) == ["well"] * 2


def test_what_is_alike_is_not_touched_by_a_broadcast(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> Any:
        other = torch.full((3, 2), float(ranks.rank)).t().requires_grad_()
        same, version = torch.ones(4), other._version
        ranks.broadcast_into(other, 1)
        ranks.broadcast_into(same, 1)
        return other.tolist(), other._version > version, same._version

    found = all_well(in_processes(2, work, nearby=nearby))
    assert found == [([[1.0] * 3] * 2, True, 0), ([[1.0] * 3] * 2, False, 0)]


def test_several_are_on_their_way(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> list[float]:
        tensors = [torch.full((9,), float(number + ranks.rank)) for number in range(20)]
        waits = [ranks.start_all_reduce(tensor) for tensor in tensors]
        ranks.barrier()
        for wait in waits:
            wait()
        ranks.barrier()
        return [tensor[3].item() for tensor in tensors]

    assert in_processes(2, work, nearby=nearby) == [[2.0 * number + 1 for number in range(20)]] * 2


@pytest.mark.parametrize("size", [3, 700])
def test_a_sum_of_any_layout(nearby: bool, size: int) -> None:
    """Ranks may hold their parts in different layouts; sums must not mix them up."""

    def work(ranks: ProcessCollectives) -> bool:
        whole = torch.arange(float(size * size)).view(size, size)
        part = whole if ranks.rank else whole.t().contiguous().t()
        found = AllReduceSum.apply(LocalShares(ranks), part)
        return torch.equal(found, 2 * whole)

    assert in_processes(2, work, nearby=nearby) == [True, True]


def test_ranks_that_came_to_different_collectives_are_told(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> None:
        ranks.barrier()
        if ranks.rank:
            ranks.all_reduce(torch.zeros(4))
        else:
            ranks.all_gather(torch.zeros(4))

    found = in_processes(2, work, nearby=nearby, timeout=2)
    told = [one.text for one in found if one.kind == RanksApart.__name__]
    assert told or not nearby
    for text in told:
        assert "rank 0 called all_gather (4,) float32 at test_base.py:" in text
        assert "rank 1 called all_reduce (4,) float32 at test_base.py:" in text


def test_an_error_that_one_rank_has_caught_is_told_to_the_others(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> None:
        ranks.raised(
            "KeyError" if ranks.rank else "ValueError", "train.py:3"
        )  # the same line: rows are each rank's own
        ranks.barrier()
        if ranks.rank:
            ranks.raised("ValueError", "train.py:5")
        ranks.barrier()

    found = in_processes(2, work, nearby=nearby, timeout=2)
    told = [one.text for one in found if one.kind == RanksApart.__name__]
    assert told
    for text in told:
        assert "(number 3)" in text
        assert "rank 1 called all_reduce (1,) float32, after ValueError at train.py:5, at" in text


def test_threads_of_a_script_take_turns(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> list[str]:
        refused: list[str] = []

        def other() -> None:
            try:
                ranks.barrier()
            except Refused as error:
                refused.append(str(error))

        def meanwhile() -> None:
            thread = Thread(target=other)
            thread.start()
            thread.join()

        wait = ranks.start_all_reduce(torch.zeros(1))
        meanwhile()
        wait()
        meanwhile()
        return refused

    for refused in all_well(in_processes(2, work, nearby=nearby)):
        assert len(refused) == 1
        assert "two threads of the script" in refused[0]


def test_a_rank_that_went_away_is_told_with_the_line(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> None:
        ranks.barrier()
        if ranks.rank:
            os._exit(1)
        ranks.all_reduce(torch.zeros(1 << 20))  # too large for the memory in common

    first, other = in_processes(2, work, nearby=nearby)
    assert other == GONE
    assert first.kind == PeerLost.__name__
    assert first.text.startswith("rank 0 lost another rank in a collective at test_base.py:")


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_a_rank_that_does_not_come_is_told_with_the_line(nearby: bool, size: int) -> None:
    def work(ranks: ProcessCollectives) -> None:
        ranks.barrier()
        if ranks.rank:
            time.sleep(2.5)  # longer than the other waits
        else:
            ranks.all_reduce(torch.zeros(size))

    first, _ = in_processes(2, work, nearby=nearby, timeout=0.4)
    assert first.kind == TimedOut.__name__
    assert first.text.startswith("rank 0 waited")


def test_a_rank_that_finds_something_out_alone_meets_nobody(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> None:
        ranks.isolated = True
        with pytest.raises(IsolatedRank):
            ranks.all_reduce(torch.zeros(3))
        ranks.isolated = False
        ranks.barrier()

    assert in_processes(2, work, nearby=nearby) == [None] * 2


def test_ranks_agree_on_errors_without_a_message_of_its_own_if_they_exchange_anyway(nearby: bool) -> None:
    def work(ranks: ProcessCollectives) -> Any:
        came, enter = [], ranks._enter

        def count(text: bytes, told: str) -> None:
            came.append(text)
            enter(text, told)

        ranks._enter = count  # type: ignore[method-assign]
        total, found = partial(ranks.all_reduce, torch.ones(2)), list[Any]()
        for good in (True, ranks.rank == 0, False, ranks.rank == 1):
            found.append(ranks.run_or_fall_back(lambda: total() if good else 1 / 0, lambda: "otherwise"))  # noqa: B023
        found[0] = found[0].tolist()
        for good in (True, ranks.rank == 0):  # a rank that does not exchange asks the others at the end
            found.append(ranks.run_or_fall_back(lambda: 5 if good else 1 / 0, lambda: "otherwise"))  # noqa: B023
        return found, len(came), ranks.all_reduce(torch.ones(1)).item()

    expected = [[2, 2], "otherwise", "otherwise", "otherwise", 5, "otherwise"]
    assert all_well(in_processes(2, work, nearby=nearby)) == [(expected, 6 if nearby else 7, 2)] * 2


def test_tensors_are_broadcast_together(monkeypatch: pytest.MonkeyPatch, nearby: bool) -> None:
    monkeypatch.setattr(base, "COALESCE_BYTES", 64)

    def work(ranks: ProcessCollectives) -> Any:
        torch.manual_seed(ranks.rank)
        tensors = [
            torch.rand(3),
            torch.rand(2, 2).t(),
            torch.randint(9, (4,)),
            torch.rand(100),
            torch.rand(5),
            torch.rand(()),
        ]
        same = torch.ones(2)
        version, begun = same._version, ranks.begun
        with ranks.coalesced_broadcasts():
            for tensor in [*tensors, same]:
                ranks.broadcast_into(tensor, 0)
        assert same._version == version
        return ranks.begun - begun, tensors

    (count, first), (_, second), (_, third) = all_well(in_processes(3, work, nearby=nearby))
    assert count == 4  # floats of 28 bytes, of 400, of 32, and the integers
    for one, other, another in zip(first, second, third, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, another)
