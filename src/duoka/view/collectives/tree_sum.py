"""Sums in a fixed order: of a binary tree whose leaves are the shares of a batch.

Floating-point addition is not associative, so a sum has the same bits on any number of ranks only if the same pairs
are added. Leaves are paired as (0, 1), (2, 3), ..., then the pairs, and so on. Of V leaves, V a power of two, each of
W ranks, W a power of two, has V / W neighbours: a whole subtree, which it adds by itself. What is left is a tree over
ranks: a small sum is gathered and added by every rank; of a large one each rank adds a part for all, which then go to
all: 2 (W - 1) / W of the bytes, as by a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from duoka.view.collectives.base import Collectives

GATHERED = 1 << 16  # bytes of a sum that is gathered whole: above, sending all parts takes longer than a second round


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of a number of tensors that is a power of two, in a new tensor."""
    if len(parts) == 1:
        return parts[0].clone()
    level = [torch.add(one, other) for one, other in zip(parts[::2], parts[1::2], strict=True)]
    while len(level) > 1:
        level = [one.add_(other) for one, other in zip(level[::2], level[1::2], strict=True)]
    return level[0]


class Subtree:
    """The same sum of leaves that are added one by one; partial sums are formed early, to hold few tensors."""

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._sums: dict[tuple[int, int], Tensor] = {}  # (height, place) -> sum

    def has(self, place: int) -> bool:
        """Return True if the leaf at `place` was added."""
        return any((height, place >> height) in self._sums for height in range(self._leaves.bit_length()))

    def put(self, place: int, leaf: Tensor) -> bool:
        """Add the leaf at `place`, which is overwritten; return True if all leaves were added."""
        height = 0
        while (height, place ^ 1) in self._sums and 1 << height < self._leaves:
            other = self._sums.pop((height, place ^ 1))
            leaf = leaf.add_(other) if place % 2 == 0 else other.add_(leaf)
            height, place = height + 1, place // 2
        self._sums[height, place] = leaf
        return 1 << height == self._leaves

    def total(self, zero: Callable[[], Tensor]) -> Tensor:
        """Return the sum; missing leaves are `zero()`."""
        return self._under(self._leaves.bit_length() - 1, 0, zero)

    def _under(self, height: int, place: int, zero: Callable[[], Tensor]) -> Tensor:
        if (height, place) in self._sums:
            return self._sums[height, place]
        if height == 0:
            return zero()
        left, right = (self._under(height - 1, 2 * place + side, zero) for side in (0, 1))
        return left + right


def start_sum(ranks: Collectives, part: Tensor) -> Callable[[], Tensor]:
    """Start to add up all ranks' `part`; the returned function waits for the sum, the same bits on every rank."""
    if ranks.world_size == 1:
        return lambda: part
    if part.numel() * part.itemsize <= GATHERED:
        gathered = ranks.start_all_gather(part.contiguous())
        return lambda: add_up(gathered().unbind())
    flat = part.reshape(-1)
    size = -(-flat.numel() // ranks.world_size)
    padded = torch.cat([flat, flat.new_zeros(size * ranks.world_size - flat.numel())])
    exchanged = ranks.start_all_to_all(padded.view(ranks.world_size, size))

    def finish() -> Tensor:
        own = add_up(exchanged().unbind())
        return ranks.all_gather(own).view(-1)[: flat.numel()].view(part.shape)

    return finish
