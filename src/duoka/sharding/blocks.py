"""The blocks of a run: unshard, prefetch and reshard them, and reduce-scatter their gradients.

A block is unsharded (all-gathered) when a function computes with one of its parameters, and resharded when other
blocks need the memory. While one block computes, the block that followed it in the last pass is prefetched. Gradients
are reduce-scattered while the backward pass goes on, and added to `.grad` before it ends.

Which blocks are unsharded depends on the functions that were called and on their order, never on what a rank holds,
so that all ranks do the same. Why: docs/decisions/0120-sharded-parameters.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from duoka.collectives.base import Collectives, IsolatedRank
from duoka.hardware.accelerator import CopyStream
from duoka.sharding.block import Block
from duoka.sharding.gradient_norms import GradientNorms
from duoka.sharding.pack import Arriving, Kind
from duoka.sharding.views import Views
from duoka.view.view import ParameterView, View


@dataclass(frozen=True, slots=True)
class PrefetchTarget:
    """The block to prefetch after a certain other one."""

    block: ReferenceType[Block]  # it may be deleted on one rank earlier than on another
    kinds: tuple[Kind, ...]  # of what a rank then sends in its place
    size: int  # in bytes


@dataclass(frozen=True, slots=True)
class _Prefetch:
    """A block that is being prefetched. written: `View.written` at the start."""

    reference: ReferenceType[Block]
    written: int
    finish: Callable[[], list[Tensor]]

    def is_of(self, block: Block) -> bool:
        """Return True if it is this block, with its present values."""
        return self.reference() is block and self.written == block.blocks.view.written


class Blocks:
    """The blocks of a run.

    view: of the sharded parameters. on_gradient: called with each parameter that a backward pass reaches. replicas:
    the ranks with the same shards as this one, each on its machine; None: there are none.
    """

    def __init__(
        self,
        view: ParameterView,
        on_gradient: Callable[[Tensor], None] = lambda _: None,
        replicas: Collectives | None = None,
    ) -> None:
        self.view, self.on_gradient = view, on_gradient
        self.replicas = None if replicas is None else View(replicas, lambda _: None)
        self.memory: dict[int, tuple[Block, int]] = {}  # of an unsharded parameter -> its block and index
        self.norms: GradientNorms = view.gradient_norms
        self.uploads, self.downloads = CopyStream(), CopyStream()  # of offloaded parameters, and of their gradients
        self.defers = False  # True in a backward pass at whose end deferred gradients are added
        self.notes_order = False  # whether the script has hooks, which see in which order gradients are computed
        self.no_sync: frozenset[Block] = frozenset()  # blocks whose gradients stay unsharded on each rank for now
        self._unsharded: list[Block] = []  # gathered blocks, the last used one last
        self._largest = 0  # bytes of the largest block so far
        self._prefetch: _Prefetch | None = None
        self._used: tuple[Block | None, Block | None] = None, None  # the two used last
        self._used_written = -1  # `View.written` at the last use
        self.views = Views(self)
        view.write_back_views, view.update_views = self.write_back, self.views.update
        self._unsynced: dict[Block, dict[int, Tensor]] = {}  # whole gradients of this rank, by index
        self._deferred: list[tuple[Block, list[Callable[[], Arriving]]]] = []
        self._arriving: list[tuple[Block, list[Arriving]]] = []  # gradients that are being copied to the host
        self.failures = 0  # backward passes that have ended with an error

    def use(self, block: Block) -> None:
        """Note that a gathered block is used, and start to prefetch the one that followed it in the last pass."""
        if (self._used[1] is block and self._unsharded[-1:] == [block]) or self.view.ranks.isolated:
            return
        if block in self._unsharded:
            self._unsharded.remove(block)
        self._unsharded.append(block)
        before, last = self._used
        if last is not block:
            if last is not None and before is not None:
                if self.view.written == self._used_written and not block.has_copies:
                    last.prefetch_targets[before] = PrefetchTarget(ref(block), block.kinds(), block.size())
                else:  # a prefetch over an optimizer's step, or of what the script may write to, would be useless
                    last.prefetch_targets.pop(before, None)
            before, self._used = last, (last, block)
        self._used_written = self.view.written
        if before is not None and (target := block.prefetch_targets.get(before)) is not None:
            self._start_prefetch(target, block)

    def forget(self, block: Block) -> None:
        """Note that a block is resharded, or that its shards were replaced."""
        if block in self._unsharded:
            self._unsharded.remove(block)
        if self._prefetch is not None and self._prefetch.reference() is block:
            self.stop_prefetch()

    def compute_on(self, device: torch.device) -> None:
        """Set the device to which offloaded parameters were moved."""
        if self.view.device is not None and device.type != "meta":
            device = torch.empty(0, device=device).device  # with its index
            if device != self.view.computes_on:
                self.view.computes_on = device
                self.uploads, self.downloads = CopyStream(device), CopyStream(device)

    def device_of(self, rows: Tensor) -> torch.device:
        """Return the device on which a parameter is computed with. rows: this rank's."""
        moved_to = self.view.computes_on
        return rows.device if moved_to is None or rows.is_meta else moved_to

    # --- gathering

    def gather(self, block: Block) -> list[Tensor]:
        """Return the unsharded parameters of a block: those that were prefetched, or gathered now.

        Raises:
            IsolatedRank: this rank is trying something out by itself.
        """
        view = self.view
        if view.ranks.isolated:
            raise IsolatedRank
        with torch.inference_mode(False), torch.no_grad():
            prefetch, self._prefetch = self._prefetch, None
            prefetched = [] if prefetch is None else prefetch.finish()
            if prefetch is not None and prefetch.is_of(block) and not block.has_copies:
                return prefetched
            del prefetched  # before there is need for its memory
            block.reshard()
            self._make_room(block.size())
            return block.start_all_gather()()

    def _start_prefetch(self, target: PrefetchTarget, block: Block) -> None:
        """Start to prefetch `target`, which is used after `block`."""
        following, written = target.block(), self.view.written
        if following is not None and following.is_unsharded:
            return
        current = self._prefetch
        if current is not None and (current.reference, current.written) == (target.block, written):
            return
        self.stop_prefetch()
        with torch.inference_mode(False), torch.no_grad():
            if following is not None:
                following.reshard()
            self._make_room(target.size, block)
            finish = _zeros(target, self.view) if following is None else following.start_all_gather()
            finish = self.view.ranks.in_background(finish, len(target.kinds))
            self._prefetch = _Prefetch(target.block, written, finish)

    def stop_prefetch(self) -> None:
        """Wait for the block that is being prefetched, and drop it."""
        prefetch, self._prefetch = self._prefetch, None
        if prefetch is not None:
            prefetch.finish()

    def _make_room(self, size: int, keep: Block | None = None) -> None:
        """Reshard blocks, so that what is unsharded has at most twice the bytes of the largest block.

        size: bytes of the block that comes. keep: one that stays unsharded.
        """
        self._largest = max(self._largest, size)
        room = 2 * self._largest - size
        while sum(block.size() for block in self._unsharded) > room:
            oldest = next((block for block in self._unsharded if block is not keep), None)
            if oldest is None:
                return
            oldest.reshard()

    def write_back(self) -> None:
        """Copy what the script has written through views of unsharded parameters into the shards."""
        for block in [*self._unsharded]:
            block.write_back()
        self.views.write_back()

    # --- gradients

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Reduce-scatter gradients while the backward pass goes on; at the end of this context all are in `.grad`."""
        before, self.defers = self.defers, True
        self.view.aliased.write_back()
        try:
            yield
            if not before:
                self.add_unsynced(self.no_sync)
                self.add_deferred()
            self.view.aliased.gather_stale()  # the script may hold rows of a gradient
        except Exception:
            self.failures += 1
            raise
        finally:
            self.defers = before
            if not before:
                self._deferred.clear()
                self._arriving.clear()

    def defer(self, block: Block, waits: list[Callable[[], Arriving]]) -> None:
        """Add gradients to `.grad` later. To save memory, at most one block's are being communicated at a time.

        Those of the block before are copied to the host meanwhile, if they are offloaded.
        """
        if self.view.device is None:
            self.add_deferred()
        else:
            self._add_arriving()
            self._finish_deferred()
        self._deferred.append((block, waits))

    def hold_unsynced(self, block: Block, grads: dict[int, Tensor]) -> bool:
        """Keep whole gradients of a block within `no_sync`; else return False, with all that were kept in `grads`.

        So gradients of several passes are communicated once, at the price of their memory.
        """
        stays = block in self.no_sync
        sums, more = (
            (self._unsynced.setdefault(block, {}), grads) if stays else (grads, self._unsynced.pop(block, {}))
        )
        for index, grad in more.items():
            sums[index] = sums[index] + grad if index in sums else grad
        return stays

    def add_unsynced(self, but: frozenset[Block] = frozenset()) -> None:
        """Reduce-scatter gradients kept by `no_sync`, and add them to `.grad`. but: blocks that keep theirs."""
        with torch.no_grad():
            for block in [block for block in self._unsynced if block not in but]:
                self.defer(block, block.start_reduce_scatter(self._unsynced.pop(block)))
        self.add_deferred()

    def add_deferred(self) -> None:
        """Wait until the communication of deferred gradients ends, and add these gradients to `.grad`."""
        if not self._deferred and not self._arriving:  # at each access to a parameter
            return
        self._add_arriving()
        self._finish_deferred()
        self._add_arriving()

    def _finish_deferred(self) -> None:
        """Wait until the communication of deferred gradients ends."""
        deferred, self._deferred = self._deferred, []
        with torch.no_grad():
            self._arriving += [(block, [wait() for wait in waits]) for block, waits in deferred]

    def _add_arriving(self) -> None:
        arriving, self._arriving = self._arriving, []
        with torch.no_grad():
            for block, waits in arriving:
                for wait in waits:
                    for index, grad in wait().items():
                        block.accumulate(index, grad)


def _zeros(target: PrefetchTarget, view: View) -> Callable[[], list[Tensor]]:
    """Take part in the all-gather of a block that is deleted on this rank, but maybe not yet on others."""
    waits = [
        view.ranks.start_all_gather(torch.zeros(most, dtype=dtype, device=device))
        for most, dtype, device in target.kinds
    ]

    def finish() -> list[Tensor]:
        for wait in waits:
            wait()
        return []

    return finish
