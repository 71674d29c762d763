"""The blocks of a run: which are gathered, ahead of time too, which are released, and gradients under way.

The parameters of a block are gathered when a function computes with one of them, and released when other blocks need
the memory. While one block computes, the block that followed it in the last pass is gathered ahead of time. Gradients
are reduce-scattered while the backward pass goes on, and added to `.grad` before it ends.

Which blocks are gathered and released depends on the functions that were called and on their order, never on what a
rank holds, so that all ranks do the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.view.block import Block, Kind, Outlived
from duoka.view.collectives.base import Collectives, IsolatedRank
from duoka.view.support.user_code import user_line
from duoka.view.view import View


@dataclass(frozen=True, slots=True)
class Follower:
    """The block that was gathered after a certain other one.

    block: may be deleted on one rank earlier than on another. kinds: of what a rank then sends in its place. size: in
    bytes.
    """

    block: ReferenceType[Block]
    kinds: tuple[Kind, ...]
    size: int


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A block that is being gathered ahead of time. written: `View.written` at the start."""

    reference: ReferenceType[Block]
    written: int
    finish: Callable[[], list[Tensor]]

    def is_of(self, block: Block) -> bool:
        """Return True if it is this block, with its present values."""
        return self.reference() is block and self.written == block.blocks.view.written


class Blocks:
    """The blocks of a run.

    view: of the sharded parameters. memory: memory of a whole parameter -> its block and index. process: in which
    collectives can be called. reach: called with each parameter that a backward pass reaches. defers: True in a
    backward pass at whose end deferred gradients are added. holding: those whose gradients stay whole on each rank
    for now. factor: of gradients of what is computed now. copies: the
    ranks that hold the same parts as this one, each on its machine; None: no others do. offloads: rows stay in the
    host's memory, and so do gradients and what optimizers keep of them; blocks are gathered on the device to which
    the model was moved.
    """

    def __init__(
        self,
        view: View,
        reach: Callable[[Tensor], None] = lambda _: None,
        copies: Collectives | None = None,
        offloads: bool = False,
    ) -> None:
        self.view, self.reach = view, reach
        if offloads:
            view.device = torch.device("cpu")
        self.copies = None if copies is None else View(copies, lambda _: None)
        self.memory: dict[int, tuple[Block, int]] = {}
        self.process = os.getpid()
        self.defers, self.factor = False, 1.0
        self.holding: frozenset[Block] = frozenset()
        self._here: list[Block] = []  # gathered blocks, the last used one last
        self._largest = 0
        self._ahead: _Ahead | None = None
        self._used: tuple[Block | None, Block | None] = None, None  # the two used last
        self._used_written = -1  # `View.written` at the last use
        self.outlived: list[Outlived] = []
        self._unsynced: dict[Block, dict[int, Tensor]] = {}  # whole gradients of this rank, by index
        self._deferred: list[tuple[Block, list[Callable[[], dict[int, Tensor]]]]] = []

    def use(self, block: Block) -> None:
        """Note that a gathered block is used, and start to gather the one that followed it in the last pass."""
        if (self._used[1] is block and self._here[-1:] == [block]) or self.view.ranks.rank_local:
            return
        if block in self._here:
            self._here.remove(block)
        self._here.append(block)
        before, last = self._used
        if last is not block:
            if last is not None and before is not None:
                if self.view.written == self._used_written:
                    last.followers[before] = Follower(ref(block), block.kinds(), block.size())
                else:  # an optimizer's step: gathering ahead of it would be useless
                    last.followers.pop(before, None)
            before, self._used = last, (last, block)
        self._used_written = self.view.written
        if before is not None and (follower := block.followers.get(before)) is not None:
            self._gather_ahead(follower, block)

    def forget(self, block: Block) -> None:
        """Note that a block is released, or that its parts were replaced."""
        if block in self._here:
            self._here.remove(block)
        if self._ahead is not None and self._ahead.reference() is block:
            self.stop_ahead()

    def compute_on(self, device: torch.device) -> None:
        """Set the device to which offloaded parameters were moved."""
        if self.view.device is not None and device.type != "meta":
            self.view.computes_on = device

    def device_of(self, rows: Tensor) -> torch.device:
        """Return the device on which a parameter is computed with. rows: this rank's."""
        moved_to = self.view.computes_on
        return rows.device if moved_to is None or rows.is_meta else moved_to

    # --- gathering

    def gather(self, block: Block) -> list[Tensor]:
        """Return the whole parameters of a block: those that were gathered ahead of time, or gathered now.

        Raises:
            Refused: this process was forked by the script, so it cannot call collectives.
            IsolatedRank: this rank is trying something out by itself.
        """
        view = self.view
        if os.getpid() != self.process:
            raise Refused(
                f"{user_line()} computes with a sharded parameter in a process that the script started, without the "
                "other ranks; do so in the script's own process, or use another strategy"
            )
        if view.ranks.rank_local:
            raise IsolatedRank
        with torch.inference_mode(False), torch.no_grad():
            ahead, self._ahead = self._ahead, None
            found = None if ahead is None else ahead.finish()
            if ahead is None or found is None or not ahead.is_of(block) or view.aliased.copies:
                block.release()
                self._make_room(block.size())
                found = block.start_gathering()()
            return found

    def _gather_ahead(self, follower: Follower, block: Block) -> None:
        """Start to gather the follower of `block`."""
        following, written = follower.block(), self.view.written
        if self.view.aliased.copies or (following is not None and following.is_here):
            return
        if self._ahead is not None and (self._ahead.reference, self._ahead.written) == (follower.block, written):
            return
        self.stop_ahead()
        with torch.inference_mode(False), torch.no_grad():
            if following is not None:
                following.release()
            self._make_room(follower.size, block)
            finish = _zeros(follower, self.view) if following is None else following.start_gathering()
            finish = self.view.ranks.in_background(finish, len(follower.kinds))
            self._ahead = _Ahead(follower.block, written, finish)

    def stop_ahead(self) -> None:
        """Wait for the block that is being gathered ahead of time, and drop it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.finish()

    def _make_room(self, size: int, keep: Block | None = None) -> None:
        """Release blocks, so that what is gathered has at most twice the bytes of the largest block.

        size: bytes of the block that comes. keep: one that is not released.
        """
        self._largest = max(self._largest, size)
        room = 2 * self._largest - size
        while sum(one.size() for one in self._here) > room:
            oldest = next((one for one in self._here if one is not keep), None)
            if oldest is None:
                return
            oldest.release()

    def write_back_outlived(self) -> None:
        """Copy writes to views of released parameters into the parts."""
        outlived, self.outlived = self.outlived, []
        self.outlived += [one for one in outlived if one.write_back()]

    # --- gradients

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Reduce-scatter gradients while the backward pass goes on; at the end of this context all are in `.grad`."""
        before, self.defers = self.defers, True
        try:
            yield
            if not before:
                self.add_held(self.holding)
                self.add_deferred()
        finally:
            self.defers = before
            if not before:
                self._deferred.clear()

    def defer(self, block: Block, waits: list[Callable[[], dict[int, Tensor]]]) -> None:
        """Add gradients to `.grad` later. To save memory, at most one block's are being communicated at a time."""
        self.add_deferred()
        self._deferred.append((block, waits))

    def hold(self, block: Block, grads: dict[int, Tensor]) -> bool:
        """Add whole gradients to those that a block holds; returns False, and all of them in `grads`, if it must not.

        So gradients of several passes are communicated once, at the price of their memory.
        """
        stays = block in self.holding
        sums, more = (
            (self._unsynced.setdefault(block, {}), grads) if stays else (grads, self._unsynced.pop(block, {}))
        )
        for at, grad in more.items():
            sums[at] = sums[at] + grad if at in sums else grad
        return stays

    def add_held(self, but: frozenset[Block] = frozenset()) -> None:
        """Communicate gradients that blocks hold, and add them to `.grad`. but: blocks that go on to hold theirs."""
        with torch.no_grad():
            for block in [block for block in self._unsynced if block not in but]:
                self.defer(block, block.start_sums(self._unsynced.pop(block)))
        self.add_deferred()

    @contextmanager
    def scaling(self, factor: float) -> Iterator[None]:
        """Multiply gradients that leave what is computed in this context."""
        before, self.factor = self.factor, factor
        try:
            self._untrack()
            yield
        finally:
            self.factor = before
            self._untrack()

    def _untrack(self) -> None:
        for block in self._here:
            block.untrack()

    def add_deferred(self) -> None:
        """Wait until the communication of deferred gradients ends, and add these gradients to `.grad`."""
        deferred, self._deferred = self._deferred, []
        with torch.no_grad():
            for block, waits in deferred:
                for wait in waits:
                    for at, grad in wait().items():
                        block.accumulate(at, grad)


def _zeros(follower: Follower, view: View) -> Callable[[], list[Tensor]]:
    """Take part in gathering a block that is deleted on this rank, but maybe not yet on others."""
    waits = [
        view.ranks.start_all_gather(torch.zeros(most, dtype=dtype, device=device))
        for most, dtype, device in follower.kinds
    ]

    def finish() -> list[Tensor]:
        for wait in waits:
            wait()
        return []

    return finish
