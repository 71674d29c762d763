"""Replicated parameters; gradients are averaged in buckets during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from duoka.collectives.base import Collectives
from duoka.private.torch import copy_all_, is_immutable_zero
from duoka.strategies.buckets import BUCKET_BYTES, Bucketed
from duoka.strategies.compress import Compression, uncompressed
from duoka.view.originals import unnumbered, when_accumulated
from duoka.view.shares.layout import StraightThrough


class Ddp(Bucketed):
    """Parameters replicated on every rank, gradients averaged. compression: of gradients between ranks."""

    def __init__(
        self,
        ranks: Collectives,
        bucket_bytes: int = BUCKET_BYTES,
        rng_digest: Callable[[], int] = lambda: 0,
        compression: Compression = uncompressed,
    ) -> None:
        super().__init__(ranks, bucket_bytes, rng_digest)
        self._compression = compression
        self._as_views: set[int] = set()  # parameters whose gradients are views of their bucket

    def use_bucket_views(self, parameters: Iterable[Tensor]) -> None:
        self._as_views |= self._known(parameters)

    def _register(self, parameter: Tensor, index: int) -> None:
        def arrived(leaf: Tensor) -> None:
            if leaf.grad is not None:  # frozen since its use, it gets none
                self._follow_stream([leaf.grad])
                self._mark_ready(index)

        self._hooks.append(when_accumulated(parameter, arrived))

    def _flat(self, members: list[int], report: Tensor) -> Tensor:
        return torch.cat([*(self._local_gradient(index).reshape(-1) for index in members), report])

    def _local_gradient(self, index: int) -> Tensor:
        """Return this rank's gradient; zeros if it has none, or a sparse one."""
        info = self._infos[index]
        parameter = info.tensor()
        if parameter is None or parameter.grad is None or parameter.grad.is_sparse:
            return torch.zeros(info.shape, dtype=info.dtype, device=info.device)
        return parameter.grad

    def _is_sparse(self, index: int) -> bool:
        parameter = self._infos[index].tensor()
        return parameter is not None and parameter.grad is not None and parameter.grad.is_sparse

    def _holds_numbers(self, index: int) -> bool:
        return super()._holds_numbers(index) and self._compression is uncompressed

    def _start_reduction(self, flat: Tensor, members: list[int], report: int) -> Callable[[], Tensor]:
        flat[: flat.numel() - report].div_(self._ranks.world_size)
        shapes = [self._infos[index].shape for index in members]
        wait = self._ranks.start_all_reduce(flat) if report else self._compression(flat, members, shapes, self._ranks)

        def finish() -> Tensor:
            wait()
            return flat

        return finish

    def _store_gradients(self, gradients: dict[int, Tensor]) -> None:
        targets, sources, recorded = [], [], []
        for index, mean in gradients.items():
            parameter = self._infos[index].tensor()
            if parameter is None:
                continue
            if parameter.grad is not None and parameter.grad.is_sparse:
                continue  # dense on another rank: `average_sparse` raises the error
            if index in self._as_views:
                parameter.grad = mean
            elif parameter.grad is None or is_immutable_zero(parameter.grad):
                parameter.grad = mean.clone()
            else:
                targets.append(parameter.grad)
                sources.append(mean)
                if parameter.grad.requires_grad:
                    recorded.append(parameter)
        if targets:
            with torch.no_grad():
                copy_all_(targets, sources)
        for parameter in recorded:  # `View.replicate` is to see that the graph is of own rows
            with unnumbered(), torch.enable_grad():
                parameter.grad = StraightThrough.apply(parameter.grad, parameter.grad)
