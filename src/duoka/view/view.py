"""The global view of one rank: what its batch tensors, boundary and rules have in common.

Under `--strategy exact` a process computes several shares, and each has a view of its own, as if it were a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from duoka.errors import DuokaError, Refused
from duoka.view.collectives import Collectives
from duoka.view.crossings import AllSum, Entered
from duoka.view.cut import Cut
from duoka.view.lent import Lent
from duoka.view.shares import ExactShares, ShareRanks, Shares
from duoka.view.site import user_line
from duoka.view.tally import Tally


class View:
    """How one rank sees the whole batch.

    adopt: called with every leaf tensor that needs a gradient and meets rows; from then on its gradient is kept in
    step over ranks (`Strategy.adopt`). alias: gives what stands for such a leaf among this share's rows. own: the
    shares of this process. say: shows the user a line. gathered: what was computed whole. opened: why a
    (module, line) is no boundary. lent: gathered copies that the script has memory of. refusal: the first that the
    script was given, and may have caught.
    """

    def __init__(
        self,
        ranks: Collectives,
        adopt: Callable[[Tensor], None],
        say: Callable[[str], None] = lambda _: None,
        own: Shares | None = None,
        alias: Callable[[Tensor], Tensor] = lambda leaf: leaf,
    ) -> None:
        self.ranks = ranks
        self.own = Shares(ranks) if own is None else own
        self.place = len(self.own.views)  # among the own shares
        self.own.views.append(self)
        self.adopt, self.alias = adopt, alias
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

    def raised(self, error: Exception) -> None:
        """Remember what goes out to the script, which may catch it, unless a rank only finds something out.

        A refusal ends the run in the end. Anything else may be an error of this rank's rows alone (a sample that
        cannot be read, an index out of range): then the others have not seen it, and must not go on with this rank.
        """
        if self.ranks.alone or isinstance(error, StopIteration):
            return
        if isinstance(error, Refused):
            for view in self.own.views:
                view.refusal = view.refusal or error
        elif not isinstance(error, DuokaError):
            self.own.ranks.raised(type(error).__name__, user_line())

    def shares(self, n: int) -> bool:
        """Whether a batch of n samples is shared out: a smaller one than ranks stays whole on each."""
        return n >= self.ranks.world_size

    def enter(self, tensor: Tensor) -> Tensor:
        """A replicated tensor, fit to meet rows: its gradient will be the whole batch's."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        if tensor.is_leaf:
            self.adopt(tensor)
            return self.alias(tensor)
        own = self.own
        entered: Tensor = own.meet(lambda tensors: Entered.apply(own, tensors[0]), tensor)
        return entered

    def all_sum(self, part: Tensor) -> Tensor:
        """The sum over ranks of every rank's `part`, with its gradient."""
        own = self.own
        total: Tensor = own.meet(lambda parts: [AllSum.apply(own, *parts)] * len(parts), part)
        return total


def exact_view(
    ranks: Collectives,
    shares: int,
    adopt: Callable[[Tensor], None],
    alias: Callable[[int, Tensor], Tensor],
    is_alias: Callable[[Tensor], bool],
    say: Callable[[str], None],
) -> View:
    """The view of the last of a process's shares, each of which is one of `shares`; `own.views` are those of all.

    alias: gives what stands for a leaf among the rows of the own share at a place. is_alias: whether one does.
    """
    own = ExactShares(ranks, shares // ranks.world_size)
    own.is_alias = is_alias
    for place in range(own.count):
        View(ShareRanks(own, place), adopt, say, own, partial(alias, place))
    last = own.views[-1]
    for view in own.views:
        view.say, view.gathered, view.opened = last.say, last.gathered, last.opened
    return last
