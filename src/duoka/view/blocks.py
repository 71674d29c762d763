"""Blocks of sharded parameters: gathering them to compute, and reduce-scattering their gradients.

The parameters of a block are gathered when a function computes with one of them, and released when other blocks need
the memory. While one block computes, the block that followed it in the last pass is gathered ahead of time. Gradients
are reduce-scattered while the backward pass goes on, and added to `.grad` before it ends.

Which blocks are gathered and released depends on the functions that were called and on their order, never on what a
rank holds, so that all ranks do the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.private.torch import count_hooks, gradient_is_accumulated, memory_of, version_of
from duoka.view.collectives.base import IsolatedRank
from duoka.view.shares.differentiable import GatherParameters
from duoka.view.support.user_code import user_line
from duoka.view.tensor.batch import BatchTensor
from duoka.view.view import View

Kind = tuple[int, torch.dtype, torch.device]  # of a tensor to be gathered: number of entries, dtype, device


class Block:
    """Parameters that are gathered together. members: sharded ones (`sharded.py`), whose block this becomes."""

    def __init__(self, blocks: Blocks, members: Sequence[Any]) -> None:
        self.blocks = blocks
        self.parts = [BatchTensor(member._rows, member._meta.spec) for member in members]
        self.followers: WeakKeyDictionary[Block, _Follower] = WeakKeyDictionary()
        self._wholes: list[Tensor] | None = None
        self._written = -1  # `View.written` when they were gathered
        self._tracked: dict[int, Tensor] = {}
        self._cast: dict[tuple[int, torch.dtype, bool], Tensor] = {}  # by index, dtype and whether it is tracked
        self._members = [ref(member) for member in members]
        for place, member in enumerate(members):
            if "_block" in member.__dict__:
                member._block.release()
            member._block, member._place = self, place

    @property
    def is_single(self) -> bool:
        """True if it has one parameter."""
        return len(self.parts) == 1

    @property
    def is_here(self) -> bool:
        """True if its whole parameters are gathered and up to date."""
        view = self.blocks.view
        return self._wholes is not None and view.written == self._written and not view.aliased.copies

    def size(self) -> int:
        """Return the bytes of the whole parameters."""
        return sum(part._rows.itemsize * part._meta.shape.numel() for part in self.parts)

    def wholes(self) -> list[Tensor]:
        """Return the whole parameters, without gradients; a collective if they are released or were changed."""
        self.settle()
        if not self.is_here:
            found = self.blocks.gather(self)
            self._wholes, self._written = found, self.blocks.view.written
            for place, whole in enumerate(found):
                self.blocks.memory[memory_of(whole)] = self, place
        self.blocks.use(self)
        assert self._wholes is not None
        return self._wholes

    def whole(self, place: int) -> Tensor:
        """Return a whole parameter, whose gradient, if any, is reduce-scattered to the parts."""
        wholes = self.wholes()
        if not records() or not self.parts[place]._rows.requires_grad:
            return wholes[place]
        if place not in self._tracked:
            places = [at for at, part in enumerate(self.parts) if part._rows.requires_grad]
            found = GatherParameters.apply(self, places, *(self.parts[at]._rows for at in places))
            self._tracked = dict(zip(places, found, strict=True))
        return self._tracked[place]

    def cast(self, place: int, dtype: torch.dtype) -> Tensor:
        """Return a whole parameter in another dtype; it is released with the block."""
        whole = self.whole(place)
        if whole.dtype is dtype:
            return whole
        key = place, dtype, whole.requires_grad
        if key not in self._cast and (place, dtype, True) in self._cast:
            return self._cast[place, dtype, True]
        if key not in self._cast:
            with torch.inference_mode(False):
                self._cast[key] = whole.to(dtype)
            self.blocks.memory[memory_of(self._cast[key])] = self, place
        return self._cast[key]

    def untrack(self) -> None:
        """Let the next use of the whole parameters be another node of the graph."""
        self._tracked = {}
        for key in [key for key in self._cast if key[2]]:
            self.blocks.memory.pop(memory_of(self._cast.pop(key)), None)

    def release(self) -> None:
        """Release the whole parameters, and copy writes to them into the parts."""
        wholes, self._wholes = self._wholes or [], None
        self.untrack()
        for cast in self._cast.values():
            self.blocks.memory.pop(memory_of(cast), None)
        self._cast = {}
        self.blocks.forget(self)
        for part, whole in zip(self.parts, wholes, strict=False):
            self.blocks.memory.pop(memory_of(whole), None)
            if version_of(whole):
                self.blocks.view.written += 1
                with torch.no_grad():
                    part._rows.copy_(part._spec.partition.local_rows(whole, part._spec.dim))

    def settle(self) -> None:
        """Release the whole parameters if they were written to in a way that `may_write` does not show."""
        if any(map(version_of, self._wholes or ())):
            self.release()

    def kinds(self) -> tuple[Kind, ...]:
        """Return what a rank sends to gather it: the most that any rank has of each dtype and device."""
        sent = ((sizes, self.parts[places[0]]._rows) for places, sizes in self._sent())
        return tuple((max(map(sum, sizes)), rows.dtype, rows.device) for sizes, rows in sent)

    def start_gathering(self) -> Callable[[], list[Tensor]]:
        """Start to gather the parameters; the returned function waits for them."""
        started = []
        for (places, sizes), (most, *_) in zip(self._sent(), self.kinds(), strict=True):
            sent = torch.cat([self.parts[at]._local.reshape(-1) for at in places])
            if sent.numel() < most:
                sent = torch.cat([sent, sent.new_zeros(most - sent.numel())])
            started.append((places, sizes, self.blocks.view.ranks.start_all_gather(sent)))

        def finish() -> list[Tensor]:
            found: dict[int, Tensor] = {}
            for places, sizes, wait in started:
                came = wait()
                apart = [row[: sum(own)].split(own) for row, own in zip(came, sizes, strict=True)]
                for number, at in enumerate(places):
                    part = self.parts[at]
                    rows = [apart[rank][number].view(_shape_on(rank, part)) for rank in self._ranks]
                    found[at] = torch.cat(rows, part._meta.spec.dim)
            return [found[at] for at in range(len(self.parts))]

        return finish

    def _sent(self) -> list[tuple[list[int], list[list[int]]]]:
        """Return the indices of parameters that travel together, and the numbers of entries that each rank has."""
        return [
            (places, [[_shape_on(rank, self.parts[at]).numel() for at in places] for rank in self._ranks])
            for places in self._alike(range(len(self.parts)))
        ]

    @property
    def _ranks(self) -> range:
        return range(self.blocks.view.ranks.world_size)

    def _alike(self, places: Sequence[int]) -> list[list[int]]:
        """Group indices of parameters by dtype and device."""
        kinds: dict[Any, list[int]] = {}
        for at in places:
            rows = self.parts[at]._rows
            kinds.setdefault((rows.dtype, rows.device), []).append(at)
        return list(kinds.values())

    # --- for GatherParameters

    def given(self, places: list[int]) -> tuple[Tensor, ...]:
        """Return whole parameters, for its forward pass."""
        assert self._wholes is not None
        return tuple(self._wholes[at].detach() for at in places)

    def own_gradients(self, places: list[int], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Reduce-scatter (sum) gradients of whole parameters, for its backward pass.

        Returns None for those that are added to `.grad` at the end of the pass.
        """
        self.untrack()
        there = {at: grad for at, grad in zip(places, grads, strict=True) if grad is not None}
        if any(grad.layout is not torch.strided for grad in there.values()):
            raise Refused(
                f"the backward pass at {user_line()} computes a sparse gradient of a sharded parameter; make the "
                "embedding with sparse=False"
            )
        for member in map(self._members.__getitem__, there):
            if (parameter := member()) is not None:
                self.blocks.reach(parameter)
        if torch.is_grad_enabled():
            return [self._total(at, there[at]) if at in there else None for at in places]
        waits = [self._start_sum({at: there.pop(at) for at in alike}) for alike in self._alike(list(there))]
        if self.blocks.defers and all(self._only_accumulated(at) for at in places):
            self.blocks.defer(self, waits)
            return [None] * len(places)
        found = {at: part for wait in waits for at, part in wait().items()}
        return [found.get(at) for at in places]

    def accumulate(self, at: int, grad: Tensor) -> None:
        """Add the sum over ranks of a gradient to `.grad`, as autograd does."""
        rows = self.parts[at]._rows
        grad = grad / self.blocks.view.ranks.world_size  # as the hook of `View.divide_gradient` does
        if rows.grad is None:
            rows.grad = grad
        else:
            rows.grad += grad

    def _only_accumulated(self, at: int) -> bool:
        """Return True if nothing but the addition to `.grad` happens to a part's gradient in this pass."""
        rows = self.parts[at]._rows
        return count_hooks(rows) == 1 and gradient_is_accumulated(rows)

    def _total(self, at: int, grad: Tensor) -> Tensor:
        """All-reduce (sum) a gradient, with gradients of its own, and return this rank's rows."""
        view, spec = self.blocks.view, self.parts[at]._meta.spec
        total: Tensor = view.replicate(view.all_sum(grad))
        return total.narrow(spec.dim, *_span(spec.partition.bounds(view.ranks.rank)))

    def _start_sum(self, grads: dict[int, Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Start to reduce-scatter (sum) gradients of one dtype and device; the returned function waits."""
        ranks = self.blocks.view.ranks
        bounds = {at: [self.parts[at]._meta.spec.partition.bounds(rank) for rank in self._ranks] for at in grads}
        pieces = [
            torch.cat(
                [
                    grad.narrow(self.parts[at]._meta.spec.dim, *_span(bounds[at][rank])).reshape(-1)
                    for at, grad in grads.items()
                ]
            )
            for rank in self._ranks
        ]
        own = pieces[ranks.rank].numel()
        most = max(piece.numel() for piece in pieces)
        sent = torch.stack(
            [
                piece if piece.numel() == most else torch.cat([piece, piece.new_zeros(most - piece.numel())])
                for piece in pieces
            ]
        )
        del pieces
        wait = ranks.start_all_to_all(sent)
        shapes = {at: _shape_on(ranks.rank, self.parts[at]) for at in grads}

        def finish() -> dict[int, Tensor]:
            parts = wait().sum(0)[:own].split([shape.numel() for shape in shapes.values()])
            return {at: part.view(shape) for (at, shape), part in zip(shapes.items(), parts, strict=True)}

        return finish


def _span(bounds: tuple[int, int]) -> tuple[int, int]:
    return bounds[0], bounds[1] - bounds[0]


def _shape_on(rank: int, part: BatchTensor) -> torch.Size:
    """Return the shape of a rank's rows."""
    start, stop = part._meta.spec.partition.bounds(rank)
    shape = list(part._rows.shape)
    shape[part._meta.spec.dim] = stop - start
    return torch.Size(shape)


def records() -> bool:
    """Return True if autograd records what is computed."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@dataclass(frozen=True, slots=True)
class _Follower:
    """The block that was gathered after another.

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
    backward pass at whose end deferred gradients are added. factor: of gradients of what is computed now.
    """

    def __init__(self, view: View, reach: Callable[[Tensor], None] = lambda _: None) -> None:
        self.view, self.reach = view, reach
        self.memory: dict[int, tuple[Block, int]] = {}
        self.process = os.getpid()
        self.defers, self.factor = False, 1.0
        self._here: list[Block] = []  # gathered blocks, the last used one last
        self._largest = 0
        self._ahead: _Ahead | None = None
        self._used: tuple[Block | None, Block | None] = None, None  # the two used last
        self._used_written = -1  # `View.written` at the last use
        self._deferred: list[tuple[Block, list[Callable[[], dict[int, Tensor]]]]] = []

    def use(self, block: Block) -> None:
        """Note that a gathered block is used, and start to gather the one that followed it in the last pass."""
        if (self._here and self._here[-1] is block) or self.view.ranks.alone:
            return
        if block in self._here:
            self._here.remove(block)
        self._here.append(block)
        before, last = self._used
        if last is not block:
            if last is not None and before is not None:
                if self.view.written == self._used_written:
                    last.followers[before] = _Follower(ref(block), block.kinds(), block.size())
                else:  # an optimizer's step: what is gathered ahead of it is in vain
                    last.followers.pop(before, None)
            before, self._used = last, (last, block)
        self._used_written = self.view.written
        if before is not None and (follower := block.followers.get(before)) is not None:
            self._gather_ahead(follower, block)

    def forget(self, block: Block) -> None:
        """Note that a block is released, or that its parts are others now."""
        if block in self._here:
            self._here.remove(block)
        if self._ahead is not None and self._ahead.reference() is block:
            self.stop_ahead()

    # --- gathering

    def gather(self, block: Block) -> list[Tensor]:
        """Return the whole parameters of a block: those that were gathered ahead of time, or gathered now.

        Raises:
            Refused: this process has no other ranks.
            IsolatedRank: this rank is trying something out by itself.
        """
        view = self.view
        if os.getpid() != self.process:
            raise Refused(
                f"{user_line()} computes with a sharded parameter in a process that the script started, without the "
                "other ranks; do so in the script's own process, or use another strategy"
            )
        if view.ranks.alone:
            raise IsolatedRank
        with torch.inference_mode(False), torch.no_grad():
            ahead, self._ahead = self._ahead, None
            found = None if ahead is None else ahead.finish()
            if ahead is None or found is None or not ahead.is_of(block) or view.aliased.copies:
                block.release()
                self._make_room(block.size())
                found = block.start_gathering()()
            return found

    def _gather_ahead(self, follower: _Follower, block: Block) -> None:
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
        """Wait for what is being gathered ahead of time, and drop it."""
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

    # --- gradients

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Let gradients travel while the backward pass goes on; at the end of this context all are in `.grad`."""
        before, self.defers = self.defers, True
        try:
            yield
            if not before:
                self.add_deferred()
        finally:
            self.defers = before
            if not before:
                self._deferred.clear()

    def defer(self, block: Block, waits: list[Callable[[], dict[int, Tensor]]]) -> None:
        """Add gradients to `.grad` later. At most one block's are under way, to hold little memory."""
        self.add_deferred()
        self._deferred.append((block, waits))

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
        """Wait for gradients that are under way, and add them to `.grad`."""
        deferred, self._deferred = self._deferred, []
        with torch.no_grad():
            for block, waits in deferred:
                for wait in waits:
                    for at, grad in wait().items():
                        block.accumulate(at, grad)


def _zeros(follower: _Follower, view: View) -> Callable[[], list[Tensor]]:
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
