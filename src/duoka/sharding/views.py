"""Views of unsharded parameters that the script keeps: `t = layer.weight.t()`.

On one device they share the parameter's memory. Here they have the memory into which the parameter was gathered. They
keep it when the block is resharded, and the block takes it again when it is unsharded. Before a function reads or
writes shards, what the script has written to views is copied into these. After a write to shards, the ranks agree of
which parameters any script still holds a view (garbage collection may differ between ranks), and gather these
parameters again, into the memory of the views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from duoka.private.torch import (
    count_references,
    memory_of,
    set_version,
    transform_level,
    tree_leaves,
    uncounted,
    version_of,
)
from duoka.view.shares.strides import overwrite

if TYPE_CHECKING:
    from duoka.sharding.block import Block
    from duoka.sharding.blocks import Blocks


class ViewedMemory:
    """The memory of a resharded parameter that views still have. index: of the parameter in its block."""

    def __init__(self, block: Block, index: int, unsharded: Tensor) -> None:
        self.block, self.index, self.unsharded = block, index, unsharded
        self._version = version_of(unsharded)  # when it was last equal to the shards

    @property
    def is_held(self) -> bool:
        """True while a view of it exists."""
        return count_references(self.unsharded) > 1

    def write_back(self) -> None:
        """Copy what the script has written into the shard."""
        number = version_of(self.unsharded)
        self.block.copy_to_shard(self.index, self.unsharded, number - self._version)
        self._version = number

    def update(self, values: Tensor, writes: int) -> None:
        """Take the parameter's values, and the number of writes to it: autograd refuses what it has saved before."""
        with torch.no_grad(), uncounted(self.unsharded):
            overwrite(self.unsharded, values)
        self._version = writes
        set_version(self.unsharded, writes)


class Views:
    """The views that the script was given of the unsharded parameters of a run."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        # Parameters of which the script may hold views -> writes to the shard so far. The same on all ranks.
        self._given: dict[tuple[Block, int], int] = {}
        blocks.view.viewed = self._given
        self._written = 0  # `View.written` when they last had the values of their parameters
        self.memory: list[ViewedMemory] = []  # that this rank's script holds, of resharded parameters

    def note(self, used: Mapping[int, tuple[Block, int]], out: Any) -> None:
        """Note which parameters a function's result shares memory with. used: their memory -> block and index."""
        for leaf in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if (
                type(leaf) is Tensor
                and leaf.layout is torch.strided
                and (key := used.get(memory_of(leaf))) is not None
            ):
                self._given.setdefault(key, _writes(*key))

    def keep(self, block: Block, index: int, unsharded: Tensor) -> None:
        """Keep the memory of a parameter that is resharded, if it has views."""
        memory = ViewedMemory(block, index, unsharded)
        if memory.is_held:
            self.memory.append(memory)

    def take(self, block: Block, index: int, unsharded: Tensor) -> Tensor:
        """Return the memory that views of a parameter have, with its values; `unsharded` if it has no views."""
        for memory in reversed(self.memory):  # an older one may be of no view that the ranks know
            if (memory.block, memory.index) == (block, index) and (block, index) in self._given:
                self.memory.remove(memory)
                return memory.unsharded
        return unsharded

    def have_memory_of(self, tensor: Tensor) -> bool:
        """Return True if a tensor may be a view of a parameter."""
        if not self._given or transform_level() is not None or tensor.layout is not torch.strided:
            return False
        number = memory_of(tensor)
        return number in self._blocks.memory or any(memory_of(each.unsharded) == number for each in self.memory)

    def part(self, block: Block, index: int) -> None:
        """Let the views of a parameter, whose data was set to another tensor, keep their memory."""
        self._given.pop((block, index), None)
        self.memory = [each for each in self.memory if (each.block, each.index) != (block, index)]

    def write_back(self) -> None:
        """Copy what the script has written to views into the shards."""
        for each in self.memory:
            each.write_back()
        self.memory = [each for each in self.memory if each.is_held]
        if self._written != self._blocks.view.written:
            self.update()

    def update(self, written: Sequence[Tensor] = ()) -> None:
        """Let the views of parameters whose shards were written to have their values (a collective).

        written: rows that a function may have written to, also through `p.data`, which counts no writes.
        """
        self._written = self._blocks.view.written
        if not self._given:
            return
        ranks, memory = self._blocks.view.ranks, set(map(memory_of, written))
        changed = {
            (block, index): _writes(block, index)
            for (block, index), writes in self._given.items()
            if _writes(block, index) != writes or memory_of(block.shards[index]._rows) in memory
        }
        if not changed or ranks.isolated:
            return
        for block in dict.fromkeys(block for block, _ in changed):
            block.reshard()
        self.memory = [each for each in self.memory if each.is_held]
        held = {(each.block, each.index) for each in self.memory}
        votes = torch.tensor([key in held or key[0].is_gathered for key in self._given], dtype=torch.int32)
        answers = ranks.all_reduce(votes, ReduceOp.MAX).tolist()
        for key, answer in zip([*self._given], answers, strict=True):
            if not answer:
                del self._given[key]
        for key in [key for key in changed if key in self._given]:
            self._update(*key, changed[key])

    def _update(self, block: Block, index: int, writes: int) -> None:
        with torch.no_grad():
            values = block.shards[index].full_tensor()
        for each in self.memory:
            if (each.block, each.index) == (block, index):
                each.update(values, writes)
        self._given[block, index] = writes


def _writes(block: Block, index: int) -> int:
    return version_of(block.shards[index]._rows)
