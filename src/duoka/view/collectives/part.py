"""Collectives of some of the ranks, such as those of one machine.

The parts divide the ranks, and all parts call the same collectives at the same time. So these are counted and
compared as if they were collectives of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from duoka.view.collectives.process import ProcessCollectives


class PartCollectives(ProcessCollectives):
    """Collectives of the ranks `members` of `whole`, in this order. name: of the parts, equal on all ranks."""

    def __init__(self, whole: ProcessCollectives, members: Sequence[int], name: str) -> None:
        self.rank, self.world_size = members.index(whole.rank), len(members)
        self.key = whole.key
        self._whole, self._members = whole, tuple(members)
        self._store = PrefixStore(f"{name}/{members[0]}", whole._store)
        self._time_limit, self._slot, self._threads = whole._time_limit, whole._slot, whole._threads
        self._ends = whole._ends
        self._exchange = None
        self._groups = {}

    @property
    def whole(self) -> ProcessCollectives:
        return self._whole

    @property
    def members(self) -> Sequence[int]:
        return self._members

    @property
    def rank_local(self) -> bool:
        """True while this rank tries something out by itself."""
        return self._whole.rank_local

    @rank_local.setter
    def rank_local(self, value: bool) -> None:
        self._whole.rank_local = value

    def _before_collective(self) -> None:
        super()._before_collective()
        self._whole._before_collective()

    def _begin(self, what: str) -> bytes:
        return self._whole._begin(what)

    def raised(self, error: str, line: str) -> None:
        self._whole.raised(error, line)
