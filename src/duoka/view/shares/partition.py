"""The rows of a global batch that each rank has. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from duoka.planning.plan import weighted_sizes


@dataclass(frozen=True)
class Partition:
    """A batch of `n` samples, split into contiguous shares, as seen by `rank`.

    weights: of each rank's share, in proportion to which it gets rows; empty: sizes differ by at most 1. counts: the
    number of such even shares that each rank has one after the other; empty: one.

    It is also the interface of `Scattered` (`rules/recurrent.py`), whose rows are not contiguous: there `start` and
    `bounds` count rows that are concatenated rank by rank, and only `local_rows` and `in_order` know their places.
    """

    n: int
    rank: int
    world_size: int
    weights: tuple[float, ...] = field(default=(), kw_only=True)
    counts: tuple[int, ...] = field(default=(), kw_only=True)

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return the first row of a rank's share, and the row after its last."""
        return self._ends[rank], self._ends[rank + 1]

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        if self.weights:
            return 0, *accumulate(weighted_sizes(self.n, self.weights))
        ends = (0, *accumulate(self.counts)) if self.counts else range(self.world_size + 1)
        return tuple(self.n * end // ends[-1] for end in ends)

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

    @cached_property
    def largest(self) -> int:
        """Number of rows of the largest share."""
        return max(self.sizes)

    @cached_property
    def smallest(self) -> int:
        """Number of rows of the smallest share."""
        return min(self.sizes)

    def local_rows(self, full: Any, dim: int) -> Any:
        """Return this rank's rows of a tensor that has the whole batch in `dim`, as a view."""
        return full.narrow(dim, self.start, self.rows)

    def in_order(self, rows: Any) -> Any:
        """Reorder rows that are concatenated rank by rank in dimension 0 into the order of the batch."""
        return rows

    def of_process(self, rank: int, counts: Sequence[int]) -> Partition:
        """Return the partition between processes. counts: of consecutive shares of this one that each has."""
        if len(counts) == self.world_size:
            return self
        return Partition(self.n, rank, len(counts), counts=tuple(counts))

    @property
    def fewest(self) -> int:
        """Number of samples of the smallest batch that is split."""
        return sum(self.counts) or self.world_size

    def of(self, n: int, weights: tuple[float, ...]) -> Partition:
        """Return the partition of a batch of n samples between the same ranks."""
        return replace(self, n=n, weights=weights)

    def __str__(self) -> str:
        if self.world_size > 8 and len(set(self.sizes)) == 1:
            return f"{self.n} = {self.world_size} x {self.rows}"
        return f"{self.n} = {' + '.join(map(str, self.sizes))}"
