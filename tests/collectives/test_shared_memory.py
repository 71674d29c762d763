"""Real processes that hand each other tensors through memory."""

from __future__ import annotations

import mmap
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from duoka.collectives.base import PeerFailed
from duoka.collectives.process import ProcessCollectives
from duoka.collectives.shared_memory import (
    LARGE_SLOT,
    RING,
    SLOT,
    SharedMemoryExchange,
    give_up,
    is_possible,
    memory_size,
)
from duoka.errors import PeerLost, TimedOut
from tests.view.processes import all_well, forked, in_processes

pytestmark = pytest.mark.skipif(not is_possible(), reason="gloo is used on this machine")


def run_ranks(world_size: int, work: Callable[[SharedMemoryExchange], Any], timeout: float = 20.0) -> list[Any]:
    memory = mmap.mmap(-1, memory_size(world_size))
    return forked(world_size, lambda rank: work(SharedMemoryExchange(memory, rank, world_size, timeout)))


def value(rank: int, number: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return (torch.rand(size, generator=generator) * 100).to(dtype)


def kept(into: list[Any]) -> Callable[[list[Tensor]], Any]:
    return lambda rows: into.append([row.clone() for row in rows])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_gets_every_rank_s_tensor_in_the_order_of_ranks(world_size: int) -> None:
    """Many times, so that slots are used again; sizes differ, and ranks come at different times."""

    def work(nearby: SharedMemoryExchange) -> int:
        draw = random.Random(nearby.rank)
        sizes = random.Random(7)
        for number in range(100):
            if draw.random() < 0.05:
                time.sleep(draw.random() * 0.005)
            size = sizes.choice([1, 3, 1000, SLOT // 8])
            found: list[Any] = []
            nearby.start(value(nearby.rank, number, size), kept(found))()
            for rank, row in enumerate(found[0]):
                assert torch.equal(row, value(rank, number, size))
        return len(found[0])

    assert all_well(run_ranks(world_size, work)) == [world_size] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_are_on_their_way_and_end_in_any_order(world_size: int) -> None:
    def work(nearby: SharedMemoryExchange) -> int:
        same, own = random.Random(3), random.Random(nearby.rank)
        number = most = 0
        under_way: list[Any] = []
        while number < 200:
            if under_way and (same.random() < 0.4 or not nearby.accepts(torch.zeros(1))):
                at, found, wait = under_way.pop(same.randrange(len(under_way)))
                wait()
                for rank, row in enumerate(found[0]):
                    assert torch.equal(row, value(rank, at, 5))
            else:
                found = []
                under_way.append((number, found, nearby.start(value(nearby.rank, number, 5), kept(found))))
                number += 1
            most = max(most, len(under_way))
            if own.random() < 0.03:
                time.sleep(0.002)
        return most

    most = all_well(run_ranks(world_size, work))
    assert len(set(most)) == 1  # all ranks decide alike
    assert most[0] > RING  # those behind a later one that is finished need no slot


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_every_type_and_layout(dtype: torch.dtype) -> None:
    def work(nearby: SharedMemoryExchange) -> bool:
        tensor = (torch.arange(6) % 4 + nearby.rank).to(dtype).view(2, 3).t()
        found: list[Any] = []
        nearby.start(tensor, kept(found))()
        nearby.start(tensor[0, 0], kept(found))()
        other = (torch.arange(6) % 4 + 1 - nearby.rank).to(dtype).view(2, 3).t()
        pair = (tensor, other) if nearby.rank == 0 else (other, tensor)
        flat = all(torch.equal(row.view(3, 2), whole) for row, whole in zip(found[0], pair, strict=True))
        return flat and all(row[0] == whole[0, 0] for row, whole in zip(found[1], pair, strict=True))

    assert all_well(run_ranks(2, work)) == [True, True]


@pytest.mark.parametrize(
    ("ranks", "slot", "most"), [(2, SLOT, 1), (2, LARGE_SLOT, 4), (8, LARGE_SLOT, 2), (64, LARGE_SLOT, 1)]
)
def test_how_large_a_tensor_may_be(ranks: int, slot: int, most: int) -> None:
    nearby = SharedMemoryExchange(mmap.mmap(-1, memory_size(ranks, slot)), 0, ranks, 1.0)
    assert nearby.accepts(torch.zeros(most * SLOT, dtype=torch.uint8))
    assert not nearby.accepts(torch.zeros(most * SLOT + 1, dtype=torch.uint8))


def test_what_goes_this_way() -> None:
    nearby = SharedMemoryExchange(mmap.mmap(-1, memory_size(2)), 0, 2, 1.0)
    assert nearby.accepts(torch.zeros(SLOT // 4))
    assert nearby.accepts(torch.zeros(()))
    assert not nearby.accepts(torch.zeros(SLOT // 4 + 1))
    assert not nearby.accepts(torch.zeros(0))
    assert not nearby.accepts(torch.zeros(3, device="meta"))
    assert not nearby.accepts(torch.zeros(3).to_sparse())
    for _ in range(RING):
        assert nearby.accepts(torch.zeros(3))
        nearby.start(torch.zeros(3), lambda rows: None)
    assert not nearby.accepts(torch.zeros(3))


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_was_said() -> None:
    def work(nearby: SharedMemoryExchange) -> None:
        if nearby.rank == 0:
            nearby.start(torch.zeros(3), lambda rows: None)()

    first, other = run_ranks(2, work, timeout=0.2)
    assert first.kind == TimedOut.__name__
    assert "rank 0 waited" in first.text
    assert "s for rank 1" in first.text
    assert other is None


def test_a_slot_is_not_written_again_before_all_have_read_it() -> None:
    def work(nearby: SharedMemoryExchange) -> None:
        """Rank 1 sends, but reads nothing."""
        for _ in range(2 * RING):
            wait = nearby.start(torch.zeros(3), lambda rows: None)
            if nearby.rank == 0:
                wait()

    found = run_ranks(2, work, timeout=0.3)
    assert [one.kind for one in found] == [TimedOut.__name__] * 2


def test_nobody_waits_for_a_rank_that_failed_but_what_all_came_to_ends_well() -> None:
    """Rank 1 comes once and then no more; whoever watches says so in the shared memory."""
    memory, came = mmap.mmap(-1, memory_size(2)), mmap.mmap(-1, 1)

    def work(rank: int) -> str:
        nearby = SharedMemoryExchange(memory, rank, 2, timeout=60.0)
        first = nearby.start(value(rank, 1, 3), lambda rows: None)
        if rank == 1:
            came[0] = 1
            return "failed"
        while not came[0]:
            time.sleep(0.001)
        give_up(memory)
        first()
        with pytest.raises(PeerLost, match="rank 0 lost another rank"):
            nearby.start(value(rank, 2, 3), lambda rows: None)()
        return "told"

    assert all_well(forked(2, work)) == ["told", "failed"]


def test_a_rank_that_has_nothing_to_send_lets_all_know() -> None:
    """Also where it goes on at once and another is slow to look: several times in a row, with slots used again."""

    def work(nearby: SharedMemoryExchange) -> list[int]:
        failed = []
        for number in range(3 * RING):
            found: list[Any] = []
            wait = nearby.start(None if number % 3 == nearby.rank else torch.ones(5), kept(found))
            time.sleep(0.002 * nearby.rank)
            try:
                wait()
            except PeerFailed:
                failed.append(number)
            assert bool(found) == (number not in failed)
        return failed

    assert all_well(run_ranks(2, work)) == [[number for number in range(3 * RING) if number % 3 < 2]] * 2


def test_an_exchange_that_nobody_waits_for_keeps_no_other_from_a_slot() -> None:
    def work(ranks: ProcessCollectives) -> Any:
        early = ranks.in_background(ranks.start_all_gather(torch.tensor([ranks.rank])))
        totals, took = [], []
        for number in range(3 * RING):
            took.append(ranks._exchange.accepts(torch.zeros(1)))
            totals.append(ranks.all_reduce(torch.tensor(number)).item())
            totals.append(ranks.run_or_fall_back(lambda: 1, lambda: 2))
        return totals, took, early().tolist()

    for totals, took, came in all_well(in_processes(2, work, nearby=True)):
        assert totals == [value for number in range(3 * RING) for value in (2 * number, 1)]
        assert all(took)
        assert came == [[0], [1]]
