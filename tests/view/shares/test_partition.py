from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duoka.view.shares.partition import Partition


@given(st.integers(0, 5000), st.integers(1, 64))
def test_shares_cover_the_batch_once_in_order_and_evenly(n: int, world_size: int) -> None:
    partitions = [Partition(n, rank, world_size) for rank in range(world_size)]
    rows = [row for partition in partitions for row in range(partition.start, partition.start + partition.rows)]
    assert rows == list(range(n))
    sizes = [partition.rows for partition in partitions]
    assert max(sizes) - min(sizes) <= 1
    assert all(partition.sizes == tuple(sizes) and partition.largest == max(sizes) for partition in partitions)


def test_reads_as_people_write_it() -> None:
    assert str(Partition(1024, 0, 2)) == "1024 = 512 + 512"
    assert str(Partition(7, 2, 3)) == "7 = 2 + 2 + 3"
    assert str(Partition(1024, 0, 16)) == "1024 = 16 x 64"
