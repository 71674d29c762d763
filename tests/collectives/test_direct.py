"""Real processes that send each other tensors straight, over sockets."""

from __future__ import annotations

import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from duoka.collectives import direct
from duoka.collectives.base import PeerFailed
from duoka.collectives.direct import MOST, DirectExchange
from duoka.network.keys import Key
from tests.view.processes import GONE, Raised, all_well, forked

KEY = Key(b"sixteen bytes or more")
HERE = "127.0.0.1"


def run_ranks(
    world_size: int,
    work: Callable[[DirectExchange | None], Any],
    timeout: float = 20.0,
    address: Callable[[int], str | None] = lambda rank: HERE,
    key: Callable[[int], Key] = lambda rank: KEY,
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:

        def on_rank(rank: int) -> Any:
            store = FileStore(os.path.join(folder, "store"), world_size)
            return work(DirectExchange.connect(store, rank, world_size, timeout, address(rank), key(rank)))

        return forked(world_size, on_rank)


def value(rank: int, number: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return (torch.rand(size, generator=generator) * 100).to(dtype)


def exchanged(ranks: DirectExchange, tensor: Tensor, text: bytes = b"a line") -> list[Tensor]:
    found: list[Tensor] = []
    ranks.start(tensor, found.extend, text)()
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_every_rank_s_tensor_in_the_order_of_ranks(world_size: int) -> None:
    def work(ranks: DirectExchange | None) -> int:
        assert ranks is not None
        draw, sizes = random.Random(ranks.rank), random.Random(7)
        for number in range(100):
            if draw.random() < 0.05:
                time.sleep(draw.random() * 0.005)
            size = sizes.choice([1, 3, 1000, MOST // 8 // (world_size - 1)])
            for rank, row in enumerate(exchanged(ranks, value(ranks.rank, number, size))):
                assert torch.equal(row, value(rank, number, size))
        return world_size

    assert all_well(run_ranks(world_size, work)) == [world_size] * world_size


def test_several_are_on_their_way_and_end_in_any_order() -> None:
    """Of the largest that go this way, more than the kernel keeps: nobody reads until all are sent."""

    def work(ranks: DirectExchange | None) -> None:
        assert ranks is not None
        size, order = MOST // 8, list(range(32))
        random.Random(ranks.rank).shuffle(order)
        found: list[list[Tensor]] = [[] for _ in order]
        waits = [
            ranks.start(value(ranks.rank, number, size), found[number].extend, b"%d" % number) for number in range(32)
        ]
        for number in order:
            waits[number]()
            assert torch.equal(found[number][1 - ranks.rank], value(1 - ranks.rank, number, size))

    all_well(run_ranks(2, work))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex64]
)
def test_of_every_type(dtype: torch.dtype) -> None:
    def work(ranks: DirectExchange | None) -> None:
        assert ranks is not None
        for rank, row in enumerate(exchanged(ranks, value(ranks.rank, 0, 5, dtype).view(1, 5, 1))):
            assert torch.equal(row, value(rank, 0, 5, dtype))

    all_well(run_ranks(2, work))


def test_what_goes_this_way() -> None:
    def work(ranks: DirectExchange | None) -> list[bool]:
        assert ranks is not None
        sizes = (0, 1, MOST // 8, MOST // 8 + 1)
        return [ranks.accepts(torch.empty(size)) for size in sizes] + [ranks.accepts(torch.empty(1, device="meta"))]

    assert all_well(run_ranks(3, work)) == [[False, True, True, False, False]] * 3


def test_ranks_that_have_gone_apart_notice_it_at_once() -> None:
    def work(ranks: DirectExchange | None) -> None:
        assert ranks is not None
        exchanged(ranks, torch.ones(2), b"all_reduce at train.py:%d" % (7 + ranks.rank))

    for found in run_ranks(2, work):
        assert isinstance(found, Raised)
        assert (found.kind, found.text) == (
            "RanksApart",
            "the ranks called different collectives: rank 0 called all_reduce at train.py:7, rank 1 called "
            "all_reduce at train.py:8",
        )


def test_a_rank_that_dies_is_lost_and_what_it_sent_before_counts() -> None:
    def work(ranks: DirectExchange | None) -> Any:
        assert ranks is not None
        if ranks.rank == 0:
            ranks.start(torch.ones(1), lambda rows: None, b"")
            os.kill(os.getpid(), signal.SIGKILL)
        return exchanged(ranks, torch.ones(1), b""), exchanged(ranks, torch.ones(1), b"")

    gone, found = run_ranks(2, work)
    assert gone == GONE
    assert isinstance(found, Raised)
    assert found.kind == "PeerLost"
    assert found.text.startswith("rank 1 lost rank 0 while it waited for it: ")


def test_a_wait_has_its_limit() -> None:
    def work(ranks: DirectExchange | None) -> Any:
        assert ranks is not None
        if ranks.rank == 0:
            time.sleep(1.5)
            return None
        return exchanged(ranks, torch.ones(1))

    assert run_ranks(2, work, timeout=0.5)[1] == Raised("TimedOut", "rank 1 waited 0 s for rank 0")


def test_a_process_that_a_rank_forks_keeps_no_connection() -> None:
    def work(ranks: DirectExchange | None) -> Any:
        assert ranks is not None
        if ranks.rank == 0:
            if os.fork() == 0:
                time.sleep(30)
            os.kill(os.getpid(), signal.SIGKILL)
        return exchanged(ranks, torch.ones(1))

    found = run_ranks(2, work)[1]
    assert isinstance(found, Raised)
    assert found.kind == "PeerLost"


def is_none(ranks: DirectExchange | None) -> bool:
    return ranks is None


@pytest.mark.parametrize("address", [None, "203.0.113.7"])
def test_where_one_rank_cannot_all_go_without(address: str | None) -> None:
    assert run_ranks(3, is_none, address=lambda rank: address if rank == 1 else HERE) == [True] * 3


def test_a_rank_with_another_key_does_not_take_part() -> None:
    other = Key(b"another sixteen bytes")
    assert run_ranks(3, is_none, key=lambda rank: other if rank == 2 else KEY) == [True] * 3


def test_strangers_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says nothing, who says anything, and who has not the key: all come before the ranks do."""
    listen = direct.listen

    def listen_with_strangers(address: str | None) -> socket.socket | None:
        listener = listen(address)
        assert listener is not None
        for said in (b"", b"[" * 200_000, b"\n" * 100, b'["answer", 1, ["n", "s"]]\n', b'["answer", 1, 7]\n', None):
            wire = socket.create_connection(listener.getsockname())
            strangers.append(wire)
            wire.setblocking(False)
            with suppress(OSError):
                wire.send(said or b"")
            if said is None:
                wire.close()
        return listener

    strangers: list[socket.socket] = []
    monkeypatch.setattr(direct, "listen", listen_with_strangers)
    assert run_ranks(3, is_none) == [False] * 3


def test_a_rank_that_has_nothing_to_send_lets_all_know() -> None:
    def work(ranks: DirectExchange | None) -> list[int]:
        assert ranks is not None
        failed = []
        for number in range(9):
            found: list[Tensor] = []
            try:
                ranks.start(None if number % 3 == ranks.rank else torch.ones(5), found.extend, b"")()
            except PeerFailed:
                failed.append(number)
            assert len(found) == (0 if number in failed else 2)
        return failed

    assert all_well(run_ranks(2, work)) == [[0, 1, 3, 4, 6, 7]] * 2
