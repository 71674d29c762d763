"""The global view of one rank: what its batch tensors, module calls and rules have in common.

Under `--strategy exact` a process computes several shares, and each has a view of its own, as if it were a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakIdKeyDictionary

from duoka.errors import DuokaError, Refused
from duoka.private.torch import backward_of
from duoka.view.alone import OneRank
from duoka.view.collectives import Collectives
from duoka.view.crossings import AllSum, Entered, Together
from duoka.view.cut import Cut
from duoka.view.handles import unnumbered
from duoka.view.lent import Lent
from duoka.view.originals import register_hook
from duoka.view.recent import KEPT, Recent
from duoka.view.shares import DeviceShares, ExactShares, ShareRanks, Shares
from duoka.view.site import user_line
from duoka.view.tally import Tally
from duoka.view.vouched import Vouched

if TYPE_CHECKING:
    from duoka.view.draws import OwnStream
    from duoka.view.sizes import SizeWatch

_NEAR = 32  # nodes of a graph that are looked at
_ENTERED = backward_of(Entered)
_TOGETHER = backward_of(Together)


class View:
    """How one rank sees the whole batch.

    adopt: called with every leaf tensor that needs a gradient and meets rows; from then on its gradient is kept in
    step over ranks (`Strategy.adopt`). alias: gives what stands for such a leaf among this share's rows. own: the
    shares of this process. say: shows the user a line. gathered: what was computed whole. drawn: how often random
    numbers were drawn for rows. own_stream: where this rank draws them from, if not from one stream with the others.
    lent: gathered copies that the script has memory of. vouched: functions that the user says compute each row by
    itself. refusal: the first that the script was given, and may have
    caught.
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
        self.device: torch.device | None = None  # of this share, where a process has several
        self.watch: SizeWatch | None = None  # of what a compiled module does with sizes
        self.of_parameters = False  # whether its batches are parameters in parts, and what is made of them
        self.in_parts = False  # whether models that meet its batches are
        self.written = 0  # how often these may have been written into
        self.take_in: Callable[[nn.Module], None] = lambda module: None  # called with a model before its first batch
        self.drawn = 0
        self.own_stream: OwnStream | None = None
        self.lent = Lent()
        self.vouched = Vouched()
        self.metas = Recent(KEPT)  # (spec, local shape, type, order) -> Meta: what is known of such a batch
        self.programs = Recent(KEPT)  # key -> Program: what rules did (replay.py)
        self.calls = Recent(KEPT)  # key -> how many calls have come that were not replayed, as far as it matters
        self.backward_names: dict[Any, str] = {}  # what torch calls that of a loss, by the kinds of its arguments
        self._known: dict[int, ReferenceType[Tensor]] = {}  # leaves that were adopted, by identity
        self._divided: WeakIdKeyDictionary = WeakIdKeyDictionary()  # rows whose gradients are divided on arrival
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

    def vouch(self, names: Iterable[str]) -> None:
        """Take the user's word that these functions compute each row by itself."""
        vouched = Vouched(names)
        for view in self.own.views:
            view.vouched = vouched

    @property
    def met(self) -> int:
        """How often something was done that concerns other rows.

        A collective was begun, random numbers were drawn, something was computed whole (of rows that may have been
        gathered before).
        """
        return self.own.ranks.begun + self.drawn + self.gathered.total()

    def shares(self, n: int) -> bool:
        """Whether a batch of n samples is shared out: a smaller one than ranks stays whole on each."""
        return n >= self.ranks.world_size

    def enter(self, tensor: Tensor) -> Tensor:
        """What stands for a replicated tensor where it meets rows.

        On each rank it is given a gradient whose mean over ranks is the true one (crossings.py); the leaves behind
        it are adopted, so that this mean is taken at the end of the backward pass.
        """
        if (together := getattr(tensor, "come_together", None)) is not None:  # a parameter in parts (sharded.py)
            tensor = together()
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor if self.device is None else tensor.to(self.device)
        own = self.own
        if own.home is not None:
            return self._copied(tensor)
        if tensor.is_leaf:
            if id(tensor) not in self._known:
                if own.is_alias(tensor):
                    return tensor
                self._meet(tensor)
            return self.alias(tensor)
        if isinstance(tensor.grad_fn, (_ENTERED, _TOGETHER)) or (not own.exact and self._knows_leaves_of(tensor)):
            return tensor
        entered: Tensor = own.meet(lambda tensors: Entered.apply(own, tensors[0]), tensor)
        return entered

    def _copied(self, tensor: Tensor) -> Tensor:
        """A copy of a replicated tensor on this share's device."""
        if isinstance(tensor.grad_fn, _ENTERED):
            return tensor
        own = self.own

        def copies(tensors: list[Tensor]) -> list[Tensor]:
            entered = Entered.apply(own, tensors[0])
            return [one.to(view.device) for one, view in zip(entered, own.views, strict=True)]

        copied: Tensor = own.meet(copies, tensor)
        return copied

    def _meet(self, leaf: Tensor) -> None:
        key = id(leaf)
        self.adopt(leaf)
        self._known[key] = ref(leaf, lambda _: self._known.pop(key, None))

    def _knows_leaves_of(self, tensor: Tensor) -> bool:
        """Adopt the leaves that a tensor was computed from.

        False where these are too many to look for, or where a Function of the script's own, which may do anything
        to a gradient, stands between.
        """
        nodes, seen = [tensor.grad_fn], 0
        while nodes:
            node = nodes.pop()
            seen += 1
            if isinstance(node, _TOGETHER):
                continue
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                if id(leaf) not in self._known:
                    self._meet(leaf)
                continue
            if seen > _NEAR or isinstance(node, BackwardCFunction):
                return False
            nodes += [following for following, _ in node.next_functions if following is not None]  # type: ignore[union-attr]
        return True

    def divide_on_arrival(self, rows: Tensor) -> None:
        """Divide the gradient of a batch that is a leaf, of which these are the rows: it comes W times too large."""
        if rows in self._divided:
            return
        if self.own.recorder is not None:
            self.own.recorder.abandon()
        size = self.ranks.world_size
        with unnumbered():
            self._divided[rows] = register_hook(rows, lambda grad: None if grad is None else grad / size)

    def all_sum(self, part: Tensor) -> Tensor:
        """The sum over ranks of every rank's `part`, with its gradient."""
        own = self.own

        def together(parts: list[Tensor]) -> list[Tensor]:
            if own.home is not None:
                parts = [part.to(own.home) for part in parts]
            return [AllSum.apply(own, *parts)] * len(parts)

        total: Tensor = own.meet(together, part)
        return total


def device_view(devices: Sequence[torch.device], home: torch.device, say: Callable[[str], None]) -> View:
    """The view of the last of a process's shares, one on each of `devices`; they come together on `home`."""
    own = DeviceShares(OneRank(), len(devices), home)
    for place, device in enumerate(devices):
        View(ShareRanks(own, place), lambda _: None, say, own).device = device
    return _alike(own.views)


def _alike(views: list[View]) -> View:
    """The last of these, which say the same and count together."""
    last = views[-1]
    for view in views:
        view.say, view.gathered = last.say, last.gathered
    return last


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
    return _alike(own.views)
