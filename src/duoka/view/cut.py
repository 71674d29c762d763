"""Who has which rows of a global batch. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Cut:
    """A batch of `n` samples in contiguous shares, as even as can be; this is `rank`'s side of it.

    The larger shares are the last ranks', so rank `world_size - 1` always has one of the largest.
    """

    n: int
    rank: int
    world_size: int

    def bounds(self, rank: int) -> tuple[int, int]:
        """The first row of `rank`'s share and the one past its last."""
        return self.n * rank // self.world_size, self.n * (rank + 1) // self.world_size

    @cached_property
    def start(self) -> int:
        """The first row of this rank's share."""
        return self.bounds(self.rank)[0]

    @cached_property
    def rows(self) -> int:
        """How many rows this rank has."""
        return self.sizes[self.rank]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Every rank's number of rows."""
        return tuple(stop - start for start, stop in map(self.bounds, range(self.world_size)))

    @property
    def largest(self) -> int:
        """The number of rows in the largest share."""
        return self.sizes[-1]

    def own(self, whole: Any, dim: int) -> Any:
        """This rank's rows of a tensor that has all of them in `dim`."""
        return whole.narrow(dim, self.start, self.rows)

    def in_order(self, rows: Any) -> Any:
        """All ranks' rows, one rank's after the other's in dimension 0, as they are in the whole batch."""
        return rows

    def of_process(self, rank: int, world_size: int) -> Cut:
        """The cut between processes, each of which has consecutive shares of this one."""
        return Cut(self.n, rank, world_size)

    def __str__(self) -> str:
        if self.world_size > 8 and len(set(self.sizes)) == 1:
            return f"{self.n} = {self.world_size} x {self.rows}"
        return f"{self.n} = {' + '.join(map(str, self.sizes))}"
