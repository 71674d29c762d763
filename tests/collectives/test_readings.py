"""Clocks that rank 0 reads for all."""

from __future__ import annotations

import random
import time

import pytest
import torch

from duoka.collectives import readings
from duoka.collectives.process import ProcessCollectives
from duoka.collectives.shared_memory import is_possible
from duoka.errors import RanksApart
from tests.view.processes import all_well, in_processes

pytestmark = pytest.mark.skipif(not is_possible(), reason="a clock is broadcast")


def test_every_rank_has_rank_0_s_values() -> None:
    """Whoever comes first; more than the memory holds, of both kinds, with collectives between."""

    def work(ranks: ProcessCollectives) -> list[float]:
        common, own = random.Random(1), random.Random(ranks.rank)
        found = []
        for number in range(2 * readings.COUNT + 100):
            now = ranks.rank + number + (0.5 if common.random() < 0.5 else 0)
            value = ranks.reading(now if now % 1 else int(now), common.randrange(3), True)
            assert type(value) is (float if now % 1 else int)
            found.append(value)
            if own.random() < 0.01:
                time.sleep(own.random() * 0.003)
            if common.random() < 0.01:
                ranks.barrier()
        return found

    found = all_well(in_processes(3, work, nearby=True))
    assert found[0] == found[1] == found[2]


def test_readings_of_libraries_may_differ_in_number() -> None:
    """A rank that reads more often uses its own clock there, and has rank 0's value again at the next place."""

    def work(ranks: ProcessCollectives) -> list[float]:
        marks = []
        for number in range(200):
            for _ in range(3 * readings.COUNT if number == 7 and ranks.rank == 0 else number % 3 * ranks.rank):
                ranks.reading(-1.0, 1, False)
            marks += [ranks.reading(ranks.rank + number, place, False) for place in (2, 3)]
            ranks.barrier()
        return marks

    found = all_well(in_processes(2, work, nearby=True))
    assert found[0] == found[1]


def test_a_reading_that_rank_0_does_not_make_ends_the_run() -> None:
    def work(ranks: ProcessCollectives) -> str:
        ranks.barrier()  # rank 0 ends first: not before rank 1 has connected to it
        ranks.reading(1.0, 1, True)
        try:
            if ranks.rank:
                ranks.reading(1.0, 2, True)
            else:
                ranks.reading(1.0, 3, True)
                ranks.start_all_reduce(torch.zeros(1))
        except RanksApart as error:
            return str(error)
        return "well"

    found = all_well(in_processes(2, work, nearby=True))
    assert found[0] == "well"
    assert "rank 1 reads a clock at" in found[1]
