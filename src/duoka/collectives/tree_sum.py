"""Sums in a fixed order: of a binary tree whose leaves are the shares of a batch.

Floating-point addition is not associative, so a sum has the same bits on any number of ranks only if the same pairs
are added. Leaves are paired as (0, 1), (2, 3), ..., then the pairs, and so on. Each rank has neighbouring leaves: one
whole subtree if all ranks have as many, of a number that is a power of two, else up to 2 log2(leaves), each of which
it adds up by itself. What is left is a tree over these subtrees: a small sum is gathered and added by every rank; of
a large one each rank adds a part for all, which then go to all: 2 (W - 1) / W of the bytes of a subtree, as by a
ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, islice, pairwise

import torch
from torch import Tensor
from torch.nn import functional

from duoka.collectives.base import Collectives

Node = tuple[int, int]  # height above the leaves, index at this height
GATHERED = 1 << 16  # bytes of a sum that is gathered whole: above, sending all parts takes longer than a second round


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of a number of tensors that is a power of two, in a new tensor."""
    if len(parts) == 1:
        return parts[0].clone()
    level = [torch.add(left, right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    while len(level) > 1:
        level = [left.add_(right) for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]


class Tree:
    """Which whole subtrees each rank adds up. counts: leaves of each rank, whose sum is a power of two."""

    def __init__(self, counts: Sequence[int]) -> None:
        ends = [0, *accumulate(counts)]
        self.nodes = [subtrees(start, stop) for start, stop in pairwise(ends)]

    def own_sums(self, rank: int, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Return the sums of a rank's subtrees, new tensors. leaves: the rank's, in order."""
        pending = iter(leaves)
        return [add_up([*islice(pending, 1 << height)]) for height, _ in self.nodes[rank]]

    def join(self, sums: Iterable[Tensor]) -> Tensor:
        """Return the sum of all leaves. sums: of each rank's subtrees, in order; they are overwritten."""
        waiting: list[tuple[Node, Tensor]] = []
        for (height, index), total in zip(chain.from_iterable(self.nodes), sums, strict=True):
            while waiting and waiting[-1][0] == (height, index ^ 1):
                total = waiting.pop()[1].add_(total)
                height, index = height + 1, index // 2
            waiting.append(((height, index), total))
        return waiting[0][1]


def subtrees(start: int, stop: int) -> list[Node]:
    """Return the largest subtrees of the leaves from `start` to before `stop`, in order."""
    nodes = []
    while start < stop:
        height = (stop - start).bit_length() - 1
        if start:
            height = min(height, (start & -start).bit_length() - 1)
        nodes.append((height, start >> height))
        start += 1 << height
    return nodes


def start_sum(ranks: Collectives, tree: Tree, sums: Tensor) -> Callable[[], Tensor]:
    """Start to add up all ranks' leaves; the returned function waits for the sum, the same bits on every rank.

    sums: of this rank's subtrees, shape (subtrees, ...).
    """
    if ranks.world_size == 1:
        return lambda: sums[0]
    counts = list(map(len, tree.nodes))

    def joined(rows: Tensor) -> Tensor:
        return tree.join(part for row, count in zip(rows, counts, strict=True) for part in row[:count])

    sent, shape = sums.reshape(len(sums), -1), sums.shape[1:]
    if len(sums) < max(counts):
        sent = torch.cat([sent, sent.new_zeros(max(counts) - len(sums), sent.shape[1])])
    if sent.shape[1] * sent.itemsize <= GATHERED:
        gathered = ranks.start_all_gather(sent.contiguous())
        return lambda: joined(gathered()).view(shape)
    size = -(-sent.shape[1] // ranks.world_size)
    padded = functional.pad(sent, (0, size * ranks.world_size - sent.shape[1]))
    parts = padded.view(-1, ranks.world_size, size).transpose(0, 1).contiguous()
    exchanged = ranks.start_all_to_all(parts)

    def finish() -> Tensor:
        return ranks.all_gather(joined(exchanged())).view(-1)[: shape.numel()].view(shape)

    return finish
