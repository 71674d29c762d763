from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duoka.view.cut import Cut


@given(st.integers(0, 5000), st.integers(1, 64))
def test_shares_cover_the_batch_once_in_order_and_evenly(n: int, world_size: int) -> None:
    cuts = [Cut(n, rank, world_size) for rank in range(world_size)]
    rows = [row for cut in cuts for row in range(cut.start, cut.start + cut.rows)]
    assert rows == list(range(n))
    sizes = [cut.rows for cut in cuts]
    assert max(sizes) - min(sizes) <= 1
    assert all(cut.sizes == tuple(sizes) and cut.largest == max(sizes) for cut in cuts)


def test_reads_as_people_write_it() -> None:
    assert str(Cut(1024, 0, 2)) == "1024 = 512 + 512"
    assert str(Cut(7, 2, 3)) == "7 = 2 + 2 + 3"
    assert str(Cut(1024, 0, 16)) == "1024 = 16 x 64"
