from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from duoka.collectives.base import OneRank
from duoka.planning.plan import weighted_sizes
from duoka.view.shares.partition import Partition
from duoka.view.view import View

WEIGHTS = st.lists(st.floats(0, exclude_min=True, allow_infinity=False), min_size=1, max_size=20)


@given(st.integers(0, 5000), st.integers(1, 64))
def test_shares_cover_the_batch_once_in_order_and_evenly(n: int, world_size: int) -> None:
    partitions = [Partition(n, rank, world_size) for rank in range(world_size)]
    rows = [row for partition in partitions for row in range(partition.start, partition.start + partition.rows)]
    assert rows == list(range(n))
    sizes = [partition.rows for partition in partitions]
    assert max(sizes) - min(sizes) <= 1
    assert all(partition.sizes == tuple(sizes) and partition.largest == max(sizes) for partition in partitions)


@given(st.integers(0, 5000), WEIGHTS)
def test_weighted_shares_cover_the_batch_and_grow_with_the_weights(n: int, weights: list[float]) -> None:
    partitions = [Partition(n, rank, len(weights), weights=tuple(weights)) for rank in range(len(weights))]
    rows = [row for partition in partitions for row in range(partition.start, partition.start + partition.rows)]
    assert rows == list(range(n))
    sizes = partitions[0].sizes
    assert all(partition.sizes == sizes for partition in partitions)
    assert n < len(weights) or min(sizes) >= 1
    ranks = range(len(weights))
    assert all(sizes[a] >= sizes[b] for a in ranks for b in ranks if weights[a] > weights[b])
    assert all(abs(sizes[a] - sizes[b]) <= 1 for a in ranks for b in ranks if weights[a] == weights[b])


@given(st.integers(0, 5000), WEIGHTS)
def test_weighted_shares_are_within_a_row_of_their_quotas(n: int, weights: list[float]) -> None:
    exact = [Fraction(weight) for weight in weights]
    quotas = [n * weight / sum(exact) for weight in exact]
    if min(quotas) >= 1:
        assert all(abs(size - quota) < 1 for size, quota in zip(weighted_sizes(n, weights), quotas, strict=True))


def test_a_rank_that_has_a_row_only_because_each_has_one_is_named() -> None:
    said: list[str] = []
    ranks = OneRank()
    ranks.world_size = 2
    view = View(ranks, lambda leaf: None, said.append)
    for weights in ((), (3.0, 1.0), (1e-9, 1.0), (1e-9, 1.0)):
        view.set_weights(weights)
        view.partition(1)
        view.partition(8)
    assert said[1:] == ["rank 0 gets a row of each batch, more than its weight says; --devices can leave it out"]


def test_reads_as_people_write_it() -> None:
    assert str(Partition(1024, 0, 2)) == "1024 = 512 + 512"
    assert str(Partition(7, 2, 3)) == "7 = 2 + 2 + 3"
    assert str(Partition(64, 0, 2, weights=(3, 1))) == "64 = 48 + 16"
    assert str(Partition(1024, 0, 16)) == "1024 = 16 x 64"
