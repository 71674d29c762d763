"""Collectives of some of the ranks, such as those of one machine.

The parts divide the ranks, and all parts call the same collectives at the same time. So these are counted and
compared as if they were collectives of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from duoka.collectives.process import ProcessCollectives


class PartCollectives(ProcessCollectives):
    """Collectives of the ranks `members` of all ranks, in this order. name: of the parts, equal on all ranks."""

    def __init__(self, all_ranks: ProcessCollectives, members: Sequence[int], name: str) -> None:
        self.rank, self.world_size = members.index(all_ranks.rank), len(members)
        self.key = all_ranks.key
        self._all_ranks, self._members = all_ranks, tuple(members)
        self._store = PrefixStore(f"{name}/{members[0]}", all_ranks._store)
        self._time_limit, self._slot, self._threads = all_ranks._time_limit, all_ranks._slot, all_ranks._threads
        self._ends = all_ranks._ends
        self._exchange = None
        self._groups = {}

    @property
    def all_ranks(self) -> ProcessCollectives:
        return self._all_ranks

    @property
    def members(self) -> Sequence[int]:
        return self._members

    @property
    def isolated(self) -> bool:
        """True while this rank tries something out by itself."""
        return self._all_ranks.isolated

    @isolated.setter
    def isolated(self, value: bool) -> None:
        self._all_ranks.isolated = value

    def _before_collective(self) -> None:
        super()._before_collective()
        self._all_ranks._before_collective()

    def _begin(self, what: str) -> bytes:
        return self._all_ranks._begin(what)

    def raised(self, error: str, line: str) -> None:
        self._all_ranks.raised(error, line)
