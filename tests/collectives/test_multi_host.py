from __future__ import annotations

from typing import Any

import pytest
import torch

from duoka.collectives import process
from duoka.collectives.process import MultiHostCollectives, ProcessCollectives
from tests.view.processes import Raised, all_well, in_processes


def over_the_network(ranks: ProcessCollectives) -> MultiHostCollectives:
    """The same ranks, as if they were on machines of their own: the board of one has nobody else's seat."""
    from duoka.supervision.status_board import StatusBoard

    store = torch.distributed.PrefixStore("far", ranks._store)
    slot = StatusBoard.create(1, ranks.rank).slot(ranks.rank)
    return MultiHostCollectives(store, ranks.rank, ranks.world_size, ranks._time_limit, slot)


def test_what_belongs_together_is_added_up() -> None:
    def work(near: ProcessCollectives) -> Any:
        ranks = over_the_network(near)
        total = [ranks.all_reduce(torch.ones(2)).tolist() for _ in range(5)]
        ranks.barrier()
        return total, ranks.broadcast_object("word" * ranks.rank, 1), ranks._count

    assert all_well(in_processes(2, work, nearby=False)) == [([[2, 2]] * 5, "word", 8)] * 2


@pytest.mark.parametrize("every", [2, 1024])
def test_collectives_of_one_size_that_do_not_belong_together_are_noticed(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "EVERY", every)

    def work(near: ProcessCollectives) -> Any:
        ranks = over_the_network(near)
        x = torch.ones(1)
        if ranks.rank == 0:
            ranks.all_reduce(x)
        else:
            ranks.all_reduce(x)
        if every > 2:
            ranks.barrier()
        else:
            ranks.all_reduce(x)
        return "nothing was noticed"

    for found in in_processes(2, work, nearby=False):
        assert isinstance(found, Raised)
        assert found.kind == "RanksApart"
        assert (
            "the ranks of different machines called different collectives, somewhere before test_multi_host.py"
            in found.text
        )
