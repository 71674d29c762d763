"""The global view of one rank: what its batch tensors, boundary and rules have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from duoka.view.collectives import AllSum, Collectives, Entered
from duoka.view.cut import Cut


class View:
    """How one rank sees the whole batch.

    adopt: called with every leaf tensor that needs a gradient and meets rows; from then on its gradient is kept in
    step over ranks (`Strategy.adopt`). say: shows the user a line. gathered: how often an (operation, line) was
    computed whole. opened: why a (module, line) is no boundary.
    """

    def __init__(
        self, ranks: Collectives, adopt: Callable[[Tensor], None], say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.ranks = ranks
        self.adopt = adopt
        self.say = lru_cache(maxsize=256)(say)  # each line once
        self.gathered: Counter[tuple[str, str]] = Counter()
        self.opened: dict[tuple[str, str], str] = {}
        self.cut = lru_cache(maxsize=1024)(self._cut)

    def _cut(self, n: int) -> Cut:
        cut = Cut(n, self.ranks.rank, self.ranks.world_size)
        if not self.cut.cache_info().currsize:
            self.say(f"batch {cut}")
        return cut

    def shares(self, n: int) -> bool:
        """Whether a batch of n samples is shared out: a smaller one than ranks stays whole on each."""
        return n >= self.ranks.world_size

    def enter(self, tensor: Tensor) -> Tensor:
        """A replicated tensor, fit to meet rows: its gradient will be the whole batch's."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        if tensor.is_leaf:
            self.adopt(tensor)
            return tensor
        entered: Tensor = Entered.apply(tensor, self.ranks)
        return entered

    def all_sum(self, part: Tensor) -> Tensor:
        """The sum over ranks of every rank's `part`, with its gradient."""
        total: Tensor = AllSum.apply(part, self.ranks)
        return total
