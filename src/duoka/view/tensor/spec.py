"""The placement of the samples in a batch tensor (`Spec`), and its properties (`Meta`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duoka.private.torch import negative_of
from duoka.view.shares.differentiable import AllGatherRows
from duoka.view.shares.partition import Partition
from duoka.view.shares.strides import Strides, contiguous_strides, global_strides, local_strides
from duoka.view.transforms import operators_are_observed, without_modes
from duoka.view.view import View


@dataclass(frozen=True, slots=True)
class Spec:
    """The placement of the samples in a tensor: dimension `dim` has the size `outer * n * inner`.

    `[B, T, C].view(-1, C)` has inner = T, `[T, B, C].view(-1, C)` has outer = T.
    """

    view: View
    partition: Partition
    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """Size of the batch dimension, of all ranks together."""
        return self.outer * self.partition.n * self.inner

    @property
    def local_size(self) -> int:
        """Size of the batch dimension that this rank holds."""
        return self.outer * self.partition.rows * self.inner

    def at(self, dim: int) -> Spec:
        """Return the placement of the same rows in another dimension."""
        return self if dim == self.dim else replace(self, dim=dim)

    def local_rows(self, full: Tensor, dim: int | None = None) -> Tensor:
        """Return this rank's rows of a replicated tensor, along `dim` (default: `self.dim`).

        The result is a view, except with `outer` > 1, where it may be a copy.
        """
        dim = self.dim if dim is None else dim
        full = self.view.replicate(full)
        if self.outer == 1 == self.inner:
            rows: Tensor = self.partition.local_rows(full, dim)
            return rows
        apart = full.unflatten(dim, (self.outer, self.partition.n, self.inner))
        local: Tensor = self.partition.local_rows(apart, dim + 1).flatten(dim, dim + 2)
        return local

    @property
    def determines_strides(self) -> bool:
        """True if every rank's rows determine the strides of the batch; a single row does not.

        Nor do several blocks of a single row: a dimension of size 1 may have the stride of samples, or of blocks.
        """
        return self.partition.smallest * self.inner > 1

    def local_strides(self, strides: Strides) -> Strides:
        """Return the strides of this rank's rows of a batch with these strides."""
        return local_strides(strides, self.dim, self.inner, self.partition.n, self.partition.rows)

    def strides_of(self, full: Tensor) -> Strides:
        """Return the strides of the batch that a replicated tensor becomes: its own, or those of a dense copy.

        Where a distance is no multiple of that of all samples (`x[:, :2].T` of three columns), rows that are cut out
        of its memory would overlap.
        """
        strides, samples = full.stride(), full.stride(self.dim) * self.partition.n
        distances = [stride for size, stride in zip(full.shape, strides, strict=True) if size > 1]
        if samples == 0 or all(distance < samples or distance % samples == 0 for distance in distances):
            return strides
        return torch.empty_like(full, device="meta").stride()

    def global_strides(self, local: Tensor, shape: Sequence[int]) -> Strides:
        """Return the strides of the batch, of global `shape`, that follow from those of this rank's rows."""
        if self.partition.rows * self.inner <= 1 and local.is_contiguous():
            return contiguous_strides(shape)
        return global_strides(local.stride(), self.dim, self.inner, self.partition.n, self.partition.rows)

    def gather(self, local: Tensor) -> Tensor:
        """All-gather: return the replicated tensor of which `local` are this rank's rows."""
        full: Tensor = self.view.shares.synchronize(
            lambda parts: [Spec.gather_shares(parts)] * len(parts), (self, local)
        )
        return full

    @staticmethod
    def gather_shares(parts: list[tuple[Spec, Tensor]]) -> Tensor:
        """All-gather the rows of all shares. parts: placement and rows of each local share."""
        spec, local = parts[0]
        with without_modes() if operators_are_observed() else nullcontext():
            apart = [
                rows.unflatten(spec.dim, (spec.outer, of.partition.rows, spec.inner)).movedim(spec.dim + 1, 0)
                for of, rows in parts
            ]
            full: Tensor = AllGatherRows.apply(spec.view.shares, tuple(of.partition for of, _ in parts), *apart)
            full = spec.partition.in_order(full).movedim(0, spec.dim + 1).flatten(spec.dim, spec.dim + 2)
            return full.contiguous() if local.is_contiguous() else full


@dataclass(frozen=True, slots=True, eq=False)
class Meta:
    """All properties of a batch tensor except its values. Equal ones are one object, to be compared by identity."""

    spec: Spec
    shape: torch.Size  # of the global batch, as are the strides: those that one device's tensor has
    strides: Strides
    dtype: torch.dtype
    local_shape: torch.Size  # of this rank's rows
    local_strides: Strides
    bits: tuple[bool, bool]  # whether it is to be read as the conjugate of its memory, and as the negative

    @staticmethod
    def of(local: Tensor, spec: Spec, strides: Strides | None = None) -> Meta:
        """Return the Meta of the batch of which `local` are this rank's rows.

        strides: of the global batch; default: those that follow from the rows' (`Spec.determines_strides`).

        Raises:
            AssertionError: the size of its batch dimension is not that of this rank's share.
        """
        metas, local_shape, bits = spec.view.metas, local.shape, (local.is_conj(), local.is_neg())
        key = spec, local_shape, local.dtype, local.stride(), strides, bits
        known: Meta | None = metas[key]
        if known is None:
            shape = list(local_shape)
            if shape[spec.dim] != spec.local_size:
                raise AssertionError(
                    f"a tensor of shape {tuple(shape)} does not hold {spec.local_size} rows in dimension {spec.dim}"
                )
            shape[spec.dim] = spec.size
            if strides is None:
                strides = spec.global_strides(local, shape)
            of_batch = spec, tuple(shape), local.dtype, strides, bits
            known = metas[of_batch]
            if known is None:
                watch = spec.view.watch
                size = torch.Size(shape) if watch is None else watch.size(shape, spec.dim)
                known = Meta(spec, size, strides, local.dtype, local_shape, spec.local_strides(strides), bits)
                metas.keep(of_batch, known)
            metas.keep(key, known)
        return known

    def of_zeros(self, device: str = "meta") -> Tensor:
        """Return a tensor of zeros, or without values on "meta", with the properties of the global batch."""
        tensor = zeros(self.shape, self.strides, self.dtype, device)
        conjugate, negative = self.bits
        tensor = tensor.conj() if conjugate else tensor
        return negative_of(tensor) if negative else tensor


def zeros(shape: Sequence[int], strides: Strides, dtype: torch.dtype, device: str) -> Tensor:
    """Return a tensor of zeros with these strides; on "meta" it has no values."""
    extent = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.zeros(extent, dtype=dtype, device=device).as_strided(shape, strides)
