"""The rows of a global batch that each rank has. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Partition:
    """A batch of `n` samples, split into contiguous shares whose sizes differ by at most 1, as seen by `rank`.

    The last ranks have the larger shares, so rank `world_size - 1` always has one of the largest.

    It is also the interface of `Scattered` (`rules/packing.py`), whose rows are not contiguous: there `start` and
    `bounds` count rows that are concatenated rank by rank, and only `local_rows` and `in_order` know their places.
    """

    n: int
    rank: int
    world_size: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first row of a rank's share, and the row after its last."""
        return self.n * rank // self.world_size, self.n * (rank + 1) // self.world_size

    @cached_property
    def start(self) -> int:
        """The first row of this rank's share."""
        return self.bounds(self.rank)[0]

    @cached_property
    def rows(self) -> int:
        """Number of rows of this rank's share."""
        return self.sizes[self.rank]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each rank's share."""
        return tuple(stop - start for start, stop in map(self.bounds, range(self.world_size)))

    @property
    def largest(self) -> int:
        """Number of rows of the largest share."""
        return self.sizes[-1]

    @cached_property
    def smallest(self) -> int:
        """Number of rows of the smallest share."""
        return min(self.sizes)

    def local_rows(self, whole: Any, dim: int) -> Any:
        """Return this rank's rows of a tensor that has the whole batch in `dim`, as a view."""
        return whole.narrow(dim, self.start, self.rows)

    def in_order(self, rows: Any) -> Any:
        """Reorder rows that are concatenated rank by rank in dimension 0 into the order of the batch."""
        return rows

    def of_process(self, rank: int, world_size: int) -> Partition:
        """Return the partition between processes, each of which has consecutive shares of this one."""
        return Partition(self.n, rank, world_size)

    def __str__(self) -> str:
        if self.world_size > 8 and len(set(self.sizes)) == 1:
            return f"{self.n} = {self.world_size} x {self.rows}"
        return f"{self.n} = {' + '.join(map(str, self.sizes))}"
