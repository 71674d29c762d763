"""A block: sharded parameters that are gathered together, and whose gradients are reduce-scattered together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.private.torch import count_hooks, count_references, gradient_is_accumulated, memory_of, version_of
from duoka.view.copies import CopyStream
from duoka.view.shares.differentiable import GatherParameters
from duoka.view.support.transforms import records_gradients
from duoka.view.support.user_code import user_line
from duoka.view.tensor.batch import BatchTensor

if TYPE_CHECKING:
    from duoka.view.blocks import Blocks, PrefetchTarget

Kind = tuple[int, torch.dtype, torch.device]  # of a tensor to be gathered: number of entries, dtype, device
Arriving = Callable[[], dict[int, Tensor]]  # waits for gradients that are copied to the host, by index


class Block:
    """Parameters that are gathered together. members: sharded parameters (`sharded.py`), whose block this becomes.

    shards: this rank's rows of each parameter. prefetch_targets: block used before this one -> the block that was
    used after this one then.
    """

    def __init__(self, blocks: Blocks, members: Sequence[Any]) -> None:
        self.blocks = blocks
        self.shards = [BatchTensor(member._rows, member._meta.spec) for member in members]
        self.prefetch_targets: WeakKeyDictionary[Block, PrefetchTarget] = WeakKeyDictionary()
        self._unsharded: list[Tensor] | None = None
        self._written = -1  # `View.written` when they were gathered
        self._tracked: dict[int, Tensor] = {}
        self._cast: dict[tuple[int, torch.dtype, bool], Tensor] = {}  # by index, dtype and whether it is tracked
        self._members = [ref(member) for member in members]
        for place, member in enumerate(members):
            if "_block" in member.__dict__:
                member._block.reshard()
            member._block, member._place = self, place

    @property
    def is_single(self) -> bool:
        """True if it has one parameter."""
        return len(self.shards) == 1

    @property
    def is_unsharded(self) -> bool:
        """True if its unsharded parameters are gathered and up to date."""
        view = self.blocks.view
        return self._unsharded is not None and view.written == self._written and not view.aliased.copies

    def size(self) -> int:
        """Return the bytes of the unsharded parameters."""
        return sum(part._rows.itemsize * part._meta.shape.numel() for part in self.shards)

    def unshard(self) -> list[Tensor]:
        """Return the unsharded parameters, without gradients; all-gather them if necessary."""
        self.write_back()
        if not self.is_unsharded:
            found = self.blocks.gather(self)
            self._unsharded, self._written = found, self.blocks.view.written
            for place, whole in enumerate(found):
                self.blocks.memory[memory_of(whole)] = self, place
        self.blocks.use(self)
        assert self._unsharded is not None
        return self._unsharded

    def unsharded(self, place: int) -> Tensor:
        """Return an unsharded parameter, whose gradient, if any, is reduce-scattered to the shards."""
        wholes = self.unshard()
        if not records_gradients() or not self.shards[place]._rows.requires_grad:
            return wholes[place]
        if place not in self._tracked:
            places = [at for at, part in enumerate(self.shards) if part._rows.requires_grad]
            found = GatherParameters.apply(self, places, *(self.shards[at]._rows for at in places))
            self._tracked = dict(zip(places, found, strict=True))
        return self._tracked[place]

    def cast(self, place: int, dtype: torch.dtype) -> Tensor:
        """Return an unsharded parameter in another dtype; the copy is freed with the block."""
        whole = self.unsharded(place)
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
        """Drop the graph node of the unsharded parameters: their next use makes a new one."""
        self._tracked = {}
        for key in [key for key in self._cast if key[2]]:
            self.blocks.memory.pop(memory_of(self._cast.pop(key)), None)

    def reshard(self) -> None:
        """Free the unsharded parameters, and copy writes to them into the shards."""
        wholes, self._unsharded = self._unsharded or [], None
        self.untrack()
        for cast in self._cast.values():
            self.blocks.memory.pop(memory_of(cast), None)
        self._cast = {}
        self.blocks.forget(self)
        for place, whole in enumerate(wholes):
            self.blocks.memory.pop(memory_of(whole), None)
            if version_of(whole):
                self.copy_to_shard(place, whole)
            if count_references(whole) > 1:
                self.blocks.stale_views.append(StaleView(self, place, whole))

    def copy_to_shard(self, place: int, whole: Tensor) -> None:
        """Copy writes to an unsharded parameter into this rank's shard."""
        self.blocks.view.written += 1
        with torch.no_grad():
            part = self.shards[place]
            part._rows.copy_(part._spec.partition.local_rows(whole, part._spec.dim))

    def write_back(self) -> None:
        """Copy writes to unsharded parameters that `may_write` does not detect into the shards."""
        if any(map(version_of, self._unsharded or ())):
            self.reshard()
        if self.blocks.stale_views:
            self.blocks.write_back_stale_views()

    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of tensors that a rank sends to gather the block, padded to the largest of any rank."""
        sent = ((sizes, self.shards[places[0]]._rows) for places, sizes in self._sent())
        return tuple((max(map(sum, sizes)), rows.dtype, self.blocks.device_of(rows)) for sizes, rows in sent)

    def start_all_gather(self) -> Callable[[], list[Tensor]]:
        """Start to gather the parameters; the returned function waits for them."""
        started = []
        for (places, sizes), (most, _, device) in zip(self._sent(), self.kinds(), strict=True):
            rows = [self.shards[at]._local.reshape(-1) for at in places]
            uploads = self.blocks.uploads if rows[0].device != device else CopyStream()
            with uploads.current():
                sent = uploads.upload(rows)
                if sent.numel() < most:
                    sent = torch.cat([sent, sent.new_zeros(most - sent.numel())])
                started.append((places, sizes, uploads, self.blocks.view.ranks.start_all_gather(sent)))

        def finish() -> list[Tensor]:
            found: dict[int, Tensor] = {}
            for places, sizes, uploads, wait in started:
                with uploads.current():
                    came = wait()
                uploads.give(came)
                if len(places) == 1 and self._is_in_rows(places[0]):
                    found[places[0]] = came.view(self.shards[places[0]]._meta.shape).data  # no view of another tensor
                    continue
                apart = [row[: sum(own)].split(own) for row, own in zip(came, sizes, strict=True)]
                for number, at in enumerate(places):
                    part = self.shards[at]
                    rows = [apart[rank][number].view(_shape_on(rank, part)) for rank in self._ranks]
                    found[at] = torch.cat(rows, part._meta.spec.dim)
            return [found[at] for at in range(len(self.shards))]

        return finish

    def _sent(self) -> list[tuple[list[int], list[list[int]]]]:
        """Return the indices of parameters that are sent in one tensor, and the number of entries of each rank."""
        return [
            (places, [[_shape_on(rank, self.shards[at]).numel() for at in places] for rank in self._ranks])
            for places in self._alike(range(len(self.shards)))
        ]

    @property
    def _ranks(self) -> range:
        return range(self.blocks.view.ranks.world_size)

    def _alike(self, places: Sequence[int]) -> list[list[int]]:
        """Group indices of parameters by dtype and device."""
        kinds: dict[Any, list[int]] = {}
        for at in places:
            rows = self.shards[at]._rows
            kinds.setdefault((rows.dtype, rows.device), []).append(at)
        return list(kinds.values())

    # --- for GatherParameters

    def unsharded_for_forward(self, places: list[int]) -> tuple[Tensor, ...]:
        """Return unsharded parameters, for the forward pass of `GatherParameters`."""
        assert self._unsharded is not None
        return tuple(self._unsharded[at].detach() for at in places)

    def reduce_scatter_gradients(self, places: list[int], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Reduce-scatter (sum) gradients of unsharded parameters, for the backward pass of `GatherParameters`.

        Returns None for those that are added to `.grad` at the end of the pass.
        """
        self.untrack()
        self.blocks.norms.forget()
        there = {at: grad for at, grad in zip(places, grads, strict=True) if grad is not None}
        if any(grad.layout is not torch.strided for grad in there.values()):
            raise Refused(
                f"the backward pass at {user_line()} computes a sparse gradient of a sharded parameter; make the "
                "embedding with sparse=False"
            )
        for member in map(self._members.__getitem__, there):
            if (parameter := member()) is not None:
                self.blocks.on_gradient(parameter)
        if torch.is_grad_enabled():
            return [self._total(at, there[at]) if at in there else None for at in places]
        self.reshard()  # the backward pass has left it
        only_added = self.blocks.defers and all(self._only_accumulated(at) for at in places)
        if only_added and self.blocks.hold_unsynced(self, there):
            return [None] * len(places)
        waits = self.start_reduce_scatter(there)
        if only_added:
            self.blocks.defer(self, waits)
            return [None] * len(places)
        found = {at: part for wait in waits for at, part in wait()().items()}
        return [found.get(at) for at in places]

    def start_reduce_scatter(self, grads: dict[int, Tensor]) -> list[Callable[[], Arriving]]:
        """Start to reduce-scatter (sum) gradients of unsharded parameters, and clear `grads`; the functions wait."""
        return [self._start_one({at: grads.pop(at) for at in alike}) for alike in self._alike(list(grads))]

    def accumulate(self, at: int, grad: Tensor) -> None:
        """Add the sum over ranks of a gradient to `.grad`, as autograd does."""
        self.blocks.norms.forget()
        rows = self.shards[at]._rows
        grad = grad / self.blocks.view.ranks.world_size  # as the hook of `View.divide_gradient` does
        if rows.grad is None:
            rows.grad = grad
        else:
            rows.grad += grad

    def _only_accumulated(self, at: int) -> bool:
        """Return True if nothing but the addition to `.grad` happens to a shard's gradient in this pass."""
        rows = self.shards[at]._rows
        return count_hooks(rows) == 1 and gradient_is_accumulated(rows)

    def _total(self, at: int, grad: Tensor) -> Tensor:
        """All-reduce (sum) a gradient, differentiably, and return this rank's rows."""
        view, spec, replicas = self.blocks.view, self.shards[at]._meta.spec, self.blocks.replicas
        total = view.all_sum(grad)
        if replicas is not None:
            total = replicas.all_sum(total) / replicas.ranks.world_size
        total = view.replicate(total)
        own = total.narrow(spec.dim, *_span(spec.partition.bounds(view.ranks.rank)))
        return own.to(self.shards[at]._rows.device)

    def _start_one(self, grads: dict[int, Tensor]) -> Callable[[], Arriving]:
        """Start to reduce-scatter (sum) gradients of one dtype and device.

        The returned function waits, and starts to copy them to where the shards are; its result waits for that.
        """
        ranks = self.blocks.view.ranks
        sent, own = self._in_rows(grads)
        downloads = self.blocks.downloads
        downloads.reads(sent)
        wait = ranks.start_reduce_scatter(sent)
        del sent
        shapes = {at: _shape_on(ranks.rank, self.shards[at]) for at in grads}

        def finish() -> Arriving:
            with downloads.current():
                total = wait()
                if self.blocks.replicas is not None:  # the convention: a sum over the ranks that shard one model
                    replicas = self.blocks.replicas.ranks
                    total = replicas.all_reduce(total) / replicas.world_size
                downloads.reads(total)
                arrived, arrive = downloads.download(total[:own])
            parts = arrived.split([shape.numel() for shape in shapes.values()])
            found = {at: part.view(shape) for (at, shape), part in zip(shapes.items(), parts, strict=True)}

            def arriving() -> dict[int, Tensor]:
                arrive()
                return found

            return arriving

        return finish

    def _is_in_rows(self, at: int) -> bool:
        """Return True if the shards of a parameter, one after the other, are the memory of the unsharded one."""
        spec = self.shards[at]._meta.spec
        return spec.dim == 0 and len(set(spec.partition.sizes)) == 1

    def _in_rows(self, grads: dict[int, Tensor]) -> tuple[Tensor, int]:
        """Return a row of gradients for each rank, and the number of entries in this rank's.

        A single gradient is not copied, as it may be the largest of the model.
        """
        (at, grad), *others = grads.items()
        if not others and self._is_in_rows(at) and grad.is_contiguous():
            return grad.view(len(self._ranks), -1), grad.numel() // len(self._ranks)
        sizes = [[_shape_on(rank, self.shards[at]).numel() for at in grads] for rank in self._ranks]
        sent = grad.new_empty(len(self._ranks), max(map(sum, sizes)))
        for rank, row in enumerate(sent):
            into = row[: sum(sizes[rank])].split(sizes[rank])
            for (at, grad), place in zip(grads.items(), into, strict=True):
                part = self.shards[at]
                own = part._meta.spec.partition.bounds(rank)
                place.view(_shape_on(rank, part)).copy_(grad.narrow(part._meta.spec.dim, *_span(own)))
        return sent, sum(sizes[self.blocks.view.ranks.rank])


def _span(bounds: tuple[int, int]) -> tuple[int, int]:
    return bounds[0], bounds[1] - bounds[0]


def _shape_on(rank: int, part: BatchTensor) -> torch.Size:
    """Return the shape of a rank's rows."""
    start, stop = part._meta.spec.partition.bounds(rank)
    shape = list(part._rows.shape)
    shape[part._meta.spec.dim] = stop - start
    return torch.Size(shape)


class StaleView:
    """A resharded parameter whose unsharded memory is still in use, by a view that the script keeps."""

    def __init__(self, block: Block, place: int, whole: Tensor) -> None:
        self._block, self._place, self._whole = block, place, whole
        self._versions = self._now()

    def _now(self) -> tuple[int, int, int]:
        rows = self._block.shards[self._place]._rows
        return version_of(self._whole), id(rows), version_of(rows)

    def write_back(self) -> bool:
        """Copy a write to the view into the shard; return True while the memory is still in use.

        Raises:
            Refused: the parameter was changed, too, so that the view has old values in other places.
        """
        now = self._now()
        if now[0] != self._versions[0]:
            if now[1:] != self._versions[1:]:
                raise Refused(
                    f"the script has written to a view of a sharded parameter of shape {tuple(self._whole.shape)} "
                    f"that it took before the parameter was changed (noticed at {user_line()}); write to the "
                    "parameter itself: `with torch.no_grad(): parameter[...] = value`"
                )
            self._block.copy_to_shard(self._place, self._whole)
            self._versions = self._now()
        return count_references(self._whole) > 1
