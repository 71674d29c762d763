"""The global view of one rank: what its batch tensors, boundary and rules have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from duoka.errors import Refused
from duoka.view.collectives import AllSum, Collectives, Entered
from duoka.view.cut import Cut
from duoka.view.lent import Lent
from duoka.view.tally import Tally


class View:
    """How one rank sees the whole batch.

    adopt: called with every leaf tensor that needs a gradient and meets rows; from then on its gradient is kept in
    step over ranks (`Strategy.adopt`). say: shows the user a line. gathered: what was computed whole. opened: why a
    (module, line) is no boundary. lent: gathered copies that the script has memory of. refusal: the first that the
    script was given, and may have caught.
    """

    def __init__(
        self, ranks: Collectives, adopt: Callable[[Tensor], None], say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.ranks = ranks
        self.adopt = adopt
        self.say = lru_cache(maxsize=256)(say)  # each line once
        self.gathered = Tally()
        self.opened: dict[tuple[str, str], str] = {}
        self.lent = Lent()
        self.refusal: Refused | None = None
        self.cut = lru_cache(maxsize=1024)(self._cut)

    def _cut(self, n: int) -> Cut:
        cut = Cut(n, self.ranks.rank, self.ranks.world_size)
        if not self.cut.cache_info().currsize:
            self.say(f"batch {cut}")
            self.gathered.begin()
        return cut

    def refused(self, error: Refused) -> None:
        """Remember a refusal, unless a rank only finds something out."""
        if not self.ranks.alone:
            self.refusal = self.refusal or error

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
