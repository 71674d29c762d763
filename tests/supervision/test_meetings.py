"""Meetings of ranks at operations that some of them may not make."""

from __future__ import annotations

import random

import pytest
import torch

from duoka.supervision.status_board import StatusBoard
from duoka.view.collectives.process import ProcessCollectives
from duoka.view.collectives.shared_memory import is_possible
from tests.view.processes import all_well, in_processes

pytestmark = pytest.mark.skipif(not is_possible(), reason="ranks meet in shared memory")


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_meet_or_none(seed: int) -> None:
    """Each leaves out some operations, and makes others alone. Where they meet, they call a collective."""

    def work(ranks: ProcessCollectives) -> list[tuple[int, str]]:
        common, own = random.Random(seed), random.Random(seed * 7 + ranks.rank)
        met = []
        for epoch in range(60):
            together = common.random() < 0.5
            for number in range(common.randrange(4)):
                name = f"{number % 2} in epoch {epoch}"
                if not together and own.random() < 0.3:
                    continue
                if not together and own.random() < 0.2:
                    name = f"{own.random()}"
                found = ranks.meet(name)
                assert found or not together
                if found:
                    met.append((epoch, name))
                    torch.testing.assert_close(ranks.broadcast(torch.tensor([ranks.rank + 5]), 0).item(), 5)
            ranks.barrier()
        ranks.leave()
        return met

    found = all_well(in_processes(3, work, nearby=True))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 30


def test_no_rank_waits_for_one_that_has_left() -> None:
    def work(ranks: ProcessCollectives) -> bool:
        if ranks.rank == 0:
            ranks.leave()
            return False
        return ranks.meet("anything")

    assert all_well(in_processes(2, work, nearby=True)) == [False, False]


def test_a_rank_that_waits_is_seen() -> None:
    """By the command process, which names what it waits in."""
    board = StatusBoard.create(2)
    slot = board.slot(1)
    slot.begin_collective(1, "all_reduce at train.py:1")
    slot.end_collective()
    slot.begin_wait("mkdir at train.py:2")
    progress = board.read(1)
    assert (progress.waiting, progress.number, progress.text) == (True, 2, "mkdir at train.py:2")
    slot.end_wait()
    assert not board.read(1).waiting
    assert board.first_mismatch() is None
