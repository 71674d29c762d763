"""Shards of a block that are all-gathered as one tensor, and whose gradients are reduce-scattered as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from duoka.collectives.base import Collectives
from duoka.hardware.accelerator import CopyStream
from duoka.view.shares.layout import laid_out
from duoka.view.shares.strides import contiguous_strides
from duoka.view.tensor.batch import BatchTensor

Kind = tuple[int, torch.dtype, torch.device]  # of a tensor to be gathered: number of entries, dtype, device
Arriving = Callable[[], dict[int, Tensor]]  # waits for gradients that are copied to the host, by index


class Pack:
    """Shards of one dtype and device. A rank sends them one after the other, padded to the most that any rank sends.

    indices: of the parameters in their block. shards: this rank's. device: where parameters are unsharded. ranks:
    that hold the shards of one model.
    """

    def __init__(
        self, indices: Sequence[int], shards: Sequence[BatchTensor], device: torch.device, ranks: Collectives
    ) -> None:
        self.indices = tuple(indices)
        self._shards, self._device, self._ranks = shards, device, ranks
        self._shapes = [[_shape_on(rank, shard) for shard in shards] for rank in range(ranks.world_size)]
        self._sizes = [[shape.numel() for shape in shapes] for shapes in self._shapes]
        self._most = max(map(sum, self._sizes))
        metas = [shard._meta for shard in shards]
        self._is_contiguous = all(meta.strides == contiguous_strides(meta.shape) for meta in metas)

    @property
    def kind(self) -> Kind:
        """What each rank sends when the shards are all-gathered."""
        return self._most, self._shards[0]._rows.dtype, self._device

    def start_all_gather(self, uploads: CopyStream) -> Callable[[], dict[int, Tensor]]:
        """Start to gather parameters; the returned function waits for them. uploads: of offloaded shards."""
        rows = [shard._local.reshape(-1) for shard in self._shards]
        if rows[0].device == self._device:
            uploads = CopyStream()
        with uploads.current():
            sent = uploads.upload(rows)
            if sent.numel() < self._most:
                sent = torch.cat([sent, sent.new_zeros(self._most - sent.numel())])
            wait = self._ranks.start_all_gather(sent)

        def finish() -> dict[int, Tensor]:
            with uploads.current():
                received = wait()
            uploads.give(received)
            return dict(zip(self.indices, self._unpack(received), strict=True))

        return finish

    def _unpack(self, received: Tensor) -> list[Tensor]:
        """Return whole parameters. received: a row from each rank."""
        if not self._is_contiguous:
            joined = zip(self._joined(received), self._shards, strict=True)
            return [laid_out(whole, shard._meta.strides) for whole, shard in joined]
        return self._joined(received)

    def _joined(self, received: Tensor) -> list[Tensor]:
        """Return whole parameters, contiguous."""
        if self._is_in_rows:
            return [received.view(self._shards[0]._meta.shape).data]  # no view of another tensor
        by_rank = [
            [flat.view(shape) for flat, shape in zip(row[: sum(sizes)].split(sizes), shapes, strict=True)]
            for row, sizes, shapes in zip(received, self._sizes, self._shapes, strict=True)
        ]
        return [
            torch.cat(list(parts), shard._meta.spec.dim)
            for parts, shard in zip(zip(*by_rank, strict=True), self._shards, strict=True)
        ]

    @property
    def _is_in_rows(self) -> bool:
        """True if it is one parameter whose shards, one after the other, are the memory of the whole."""
        spec = self._shards[0]._meta.spec
        return len(self._shards) == 1 and spec.dim == 0 and len(set(spec.partition.sizes)) == 1

    def start_reduce_scatter(
        self, grads: list[Tensor], replicas: Collectives | None, downloads: CopyStream
    ) -> Callable[[], Arriving]:
        """Start to reduce-scatter (sum) gradients of whole parameters, and clear `grads`.

        The returned function waits, and starts to copy the sums to where the shards are; its result waits for that.
        replicas: the ranks with the same shards, if there are copies of the model. downloads: of offloaded gradients.
        """
        sent = self._packed(grads)
        grads.clear()
        downloads.reads(sent)
        wait = self._ranks.start_reduce_scatter(sent)
        del sent

        def finish() -> Arriving:
            sizes, shapes = self._sizes[self._ranks.rank], self._shapes[self._ranks.rank]
            with downloads.current():
                total = wait()
                if replicas is not None:  # the convention: a sum over the ranks that hold the shards of one model
                    total = replicas.all_reduce(total) / replicas.world_size
                downloads.reads(total)
                arrived, arrive = downloads.download(total[: sum(sizes)])
            parts = [flat.view(shape) for flat, shape in zip(arrived.split(sizes), shapes, strict=True)]

            def arriving() -> dict[int, Tensor]:
                arrive()
                return dict(zip(self.indices, parts, strict=True))

            return arriving

        return finish

    def _packed(self, grads: Sequence[Tensor]) -> Tensor:
        """Return a row of gradients for each rank."""
        if self._is_in_rows and grads[0].is_contiguous():  # no copy, as it may be the largest of the model
            return grads[0].view(self._ranks.world_size, -1)
        packed = grads[0].new_empty(self._ranks.world_size, self._most)
        for rank, (row, sizes, shapes) in enumerate(zip(packed, self._sizes, self._shapes, strict=True)):
            targets = row[: sum(sizes)].split(sizes)
            for grad, target, shape, shard in zip(grads, targets, shapes, self._shards, strict=True):
                start, stop = shard._meta.spec.partition.bounds(rank)
                target.view(shape).copy_(grad.narrow(shard._meta.spec.dim, start, stop - start))
        return packed


def _shape_on(rank: int, shard: BatchTensor) -> torch.Size:
    """Return the shape of a rank's shard."""
    start, stop = shard._meta.spec.partition.bounds(rank)
    shape = list(shard._rows.shape)
    shape[shard._meta.spec.dim] = stop - start
    return torch.Size(shape)
