"""The blocks that are gathered at a moment, with fsdp, as `duoka.view.blocks` gathers and releases them."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Gathered:
    """The gathered blocks on one of several devices.

    sizes: bytes of each whole block, by its number. single: blocks of one parameter, which is received as it is.
    """

    def __init__(self, sizes: Mapping[int, int], devices: int, single: Collection[int] = ()) -> None:
        self._sizes, self._part, self._single = sizes, 1 / devices, single
        self._here: list[int] = []  # the last used comes last
        self._stale: set[int] = set()  # of these, those whose parameters were changed since
        self._ahead: int | None = None
        self._largest = 0
        self._used: tuple[int | None, int | None] = None, None
        self._followers: dict[tuple[int, int | None], int] = {}

    @property
    def size(self) -> float:
        """Bytes held now."""
        ahead = 0.0 if self._ahead is None else self._sizes[self._ahead] * (1 + self._part)
        return sum(self._sizes[one] for one in self._here) + ahead

    def has(self, block: int) -> bool:
        """Return True if a block is gathered now."""
        return block in self._here

    def step(self) -> None:
        """Note that the parameters change: gathered blocks are outdated, but keep their memory until the next use."""
        self._stale = set(self._here)
        self._followers = {key: follower for key, follower in self._followers.items() if key[0] != self._used[1]}

    def use(self, block: int) -> float:
        """Gather a block if necessary, and the one that followed it in the last pass; return the peak bytes."""
        if self._used[1] == block and self._here[-1:] == [block] and block not in self._stale:
            return self.size
        peak = self._gather(block) if block not in self._here or block in self._stale else self.size
        if block in self._here:
            self._here.remove(block)
        self._here.append(block)
        before, last = self._used
        if last != block:
            if last is not None and before is not None:
                self._followers[last, before] = block
            before, self._used = last, (last, block)
        follower = self._followers.get((block, before))
        if follower is not None and (follower not in self._here or follower in self._stale):
            self.release(follower)
            self._make_room(self._sizes[follower], block)
            self._ahead = follower
        return max(peak, self.size)

    def _gather(self, block: int) -> float:
        """Release blocks to make room for a block, and gather it; return the peak bytes, with the receive buffer.

        Several parameters are copied out of the buffer; a single one stays in it.
        """
        size = self._sizes[block]
        received = size * (1 + self._part)
        was_ahead, self._ahead = self._ahead == block and block not in self._stale, None
        if not was_ahead:
            self.release(block)
            self._make_room(size, None)
        return self.size + received + (0 if block in self._single else size)

    def release(self, block: int) -> None:
        """Release a block, if it is here."""
        self._stale.discard(block)
        if block in self._here:
            self._here.remove(block)

    def _make_room(self, size: int, keep: int | None) -> None:
        self._largest = max(self._largest, size)
        while sum(self._sizes[one] for one in self._here) > 2 * self._largest - size:
            oldest = next((one for one in self._here if one != keep), None)
            if oldest is None:
                return
            self.release(oldest)
