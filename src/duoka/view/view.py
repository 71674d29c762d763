"""The state that all batch tensors, module calls and rules of one rank have in common.

With `--strategy exact` a process computes several shares, and each has a `View` of its own, like a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakIdKeyDictionary

from duoka.collectives.base import Collectives
from duoka.errors import DuokaError, Refused
from duoka.private.torch import (
    WithoutTorchFunctions,
    accumulates_gradient,
    backward_of,
    in_backward,
    move_hook_first,
)
from duoka.system.user_code import user_line
from duoka.view.aliased import AliasedCopies
from duoka.view.generators import RankStream
from duoka.view.originals import register_hook, unnumbered
from duoka.view.recent import KEPT, Recent
from duoka.view.saved_copies import SavedCopies
from duoka.view.shares.differentiable import GATHERED, AllReduceSum, Replicate
from duoka.view.shares.layout import laid_out_like
from duoka.view.shares.local import ExactShares, LocalShares, Outdated, ShareCollectives
from duoka.view.shares.partition import Partition
from duoka.view.tally import Tally

T = TypeVar("T", bound=AbstractContextManager[Any])
_MOST_NODES = 32  # of a graph that are searched for leaves
_REPLICATED = backward_of(Replicate)


class View:
    """The state of one rank that its batch tensors share.

    With `exact` a process computes several shares of a batch, each with a view of its own, and each share is a rank
    to its view: `ranks` are the collectives among all shares, `shares.processes` those among processes. With other
    strategies both are the same.

    Args:
        ranks: the collectives among shares.
        adopt: called with every leaf tensor that needs a gradient and is used with rows; from then on its gradient is
            averaged over ranks (`Strategy.adopt`).
        say: prints a line for the user.
        shares: the local shares.
        alias: returns the tensor that replaces a given leaf in this share (itself, except under `exact`).
        siblings: the views of the local shares, to which this one is appended.
        prepare_model: called with a model before its first call with a batch (`Strategy.prepare_model`).
        recomputed: modules that compute their activations again in the backward pass.
        leaf_hooks: leaf -> the script's hooks on it, if the strategy calls them itself.
    """

    gathers_on: torch.device | None = None  # of what is computed whole (`gathering_on`); None: that of the rows
    # Of a `ParameterView`:
    computes_on: torch.device | None = None  # the device to which offloaded parameters were moved
    gradient_norms: Any = None  # of the parameters (sharding/gradient_norms.py)
    written = 0  # operations that may have written to parameters
    viewed: Mapping[Any, int] = {}  # parameters of which the script may hold views -> writes to them so far

    def __init__(
        self,
        ranks: Collectives,
        adopt: Callable[[Tensor], None],
        say: Callable[[str], None] = lambda _: None,
        shares: LocalShares | None = None,
        alias: Callable[[Tensor], Tensor] = lambda leaf: leaf,
        siblings: list[View] | None = None,
        prepare_model: Callable[[nn.Module], None] = lambda module: None,
        recomputed: Collection[nn.Module] = (),
        leaf_hooks: WeakIdKeyDictionary | None = None,
    ) -> None:
        self.ranks = ranks
        self.shares = LocalShares(ranks) if shares is None else shares
        self.siblings = [] if siblings is None else siblings
        self.siblings.append(self)
        self.adopt, self.alias, self.prepare_model = adopt, alias, prepare_model
        self.say = lru_cache(maxsize=256)(say)  # each line once
        self.whole_operations = Tally()
        # These are read by _replay.c. device: of the rows of offloaded parameters; None: they are where they compute.
        self.device: torch.device | None = None
        self.watch: Any = None  # makes the sizes of batches within `watching`
        self.of_parameters = self.has_sharded = False
        self.sharded: list[ParameterView] = []  # of models that are called with its batches
        self.recomputed = recomputed
        self.drawn = 0  # random draws for rows
        self.batch_norm = "whole"  # or "local": of the statistics of each share
        self.rank_stream: RankStream | None = None  # of this rank's draws with `--randomness worker`
        self.aliased = AliasedCopies()  # gathered copies that the script holds references to
        self.saved = SavedCopies(self.aliased)
        self.row_independent = RowIndependent()  # functions that the user says compute each row by itself
        self.metas = Recent(KEPT)  # (spec, shape, type, strides) -> the Meta of such a batch
        self.programs = Recent(KEPT)  # key of a call -> the program recorded from its rule (dispatch/replay.py)
        self.calls = Recent(KEPT)  # key -> its calls without one
        self.outcomes = Recent(KEPT)  # key -> what the call returns, or saves, on one device (tensor/outcome.py)
        self.refusal: Refused | None = None  # the first that was raised in the script, which may have caught it
        self.weights: tuple[float, ...] = ()  # of each rank's share of a batch (`Partition`); empty: they are even
        self.largest = 0  # samples of the largest batch that was split
        self._partitions = lru_cache(maxsize=1024)(self._partition)
        self.leaf_hooks = WeakIdKeyDictionary() if leaf_hooks is None else leaf_hooks
        self._adopted: dict[int, ReferenceType[Tensor]] = {}  # leaves, by identity; read by _replay.c
        self._divided: WeakIdKeyDictionary = WeakIdKeyDictionary()  # rows that have the hook of `divide_gradient`

    def partition(self, n: int, weights: tuple[float, ...] | None = None) -> Partition:
        """Return the partition of a batch of n samples, one object for each n and weights (default: the current)."""
        return self._partitions(n, self.weights if weights is None else weights)

    def _partition(self, n: int, weights: tuple[float, ...]) -> Partition:
        self._announce(n, weights)
        return Partition(n, self.ranks.rank, self.ranks.world_size, weights=weights)

    def _announce(self, n: int, weights: tuple[float, ...]) -> None:
        """Show a batch of n samples to the user, if it is the first or the largest so far."""
        if not self._partitions.cache_info().currsize:
            self.say(f"batch {self.shares.of_process.of(n, weights)}")
            self.whole_operations.begin()
        if weights and n * min(weights) < sum(weights) / 2 and self.splits(n):
            rank = weights.index(min(weights))
            self.say(f"rank {rank} gets a row of each batch, more than its weight says; --devices can leave it out")
        if n > self.largest:
            self.largest = n
            self._show_rows()

    def _show_rows(self) -> None:
        if self.largest and not self.of_parameters:
            share = self.shares.of_process.of(self.largest, self.weights)
            self.shares.processes.show_rows(share.rows)

    def set_weights(self, weights: tuple[float, ...]) -> None:
        """Set the weights of the ranks' shares, for batches that are split from now on; all ranks call it.

        Batches that exist keep their partition. What computes with two partitions of n samples gathers one of them.
        """
        self.weights = weights
        self._show_rows()

    def raised(self, error: Exception) -> None:
        """Remember an error that is raised in the script, which may catch it.

        A Refused ends the run when the script ends. Any other error may have happened on this rank alone (an index
        out of range): the next collective reports it if the other ranks call another one.
        """
        if self.ranks.isolated or isinstance(error, StopIteration):
            return
        if isinstance(error, Refused):
            for view in self.siblings:
                view.refusal = view.refusal or error
        elif not isinstance(error, DuokaError):
            self.shares.processes.raised(type(error).__name__, user_line())

    def set_row_independent(self, names: Iterable[str]) -> None:
        """Set the functions that the user says compute each row by itself."""
        functions = RowIndependent(names)
        for view in self.siblings:
            view.row_independent = functions

    def add_sharded(self, parameters: ParameterView) -> None:
        """Note that models which are called with this view's batches have sharded parameters, of that view."""
        if parameters not in self.sharded:
            self.sharded.append(parameters)
        self.has_sharded = True

    @property
    def interactions(self) -> int:
        """Number of operations so far that involved other ranks' rows.

        Collectives, random draws, and operations computed whole (possibly on rows gathered before).
        """
        return (
            self.shares.processes.begun + self.drawn + self.whole_operations.total() + self.whole_operations.repeated
        )

    def splits(self, n: int) -> bool:
        """Return True if a batch of n samples is split over ranks; each rank holds a smaller one whole."""
        return 1 < self.ranks.world_size <= n

    @contextmanager
    def gathering_on(self, device: torch.device | None) -> Iterator[None]:
        """Within the context, put what is computed whole on a device."""
        before, self.gathers_on = self.gathers_on, device
        try:
            yield
        finally:
            self.gathers_on = before

    @contextmanager
    def watching(self, watch: T) -> Iterator[T]:
        """Within the context, let `watch` make the sizes of batches, and see torch functions (`modules/compiled.py`).

        The caches begin empty, as they hold batches with other sizes.
        """
        before = self.metas, self.programs, self.calls, self.outcomes
        self.metas, self.programs, self.calls, self.outcomes = (Recent(KEPT) for _ in before)
        self.watch = watch
        try:
            with watch:
                yield watch
        finally:
            self.metas, self.programs, self.calls, self.outcomes = before
            self.watch = None

    def replicate(self, tensor: Tensor) -> Tensor:
        """Wrap a replicated tensor that is used with rows, so that its gradient is averaged over ranks.

        A leaf is adopted instead: the strategy averages its gradient at the end of the backward pass. So are the
        leaves behind `tensor`, if they are few. Those of a pass within that pass are not: it reads their gradients.
        """
        if (unsharded := getattr(tensor, "duoka_unsharded", None)) is not None:  # of `Sharded`, which imports View
            tensor = unsharded()
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor if self.device is None else tensor.to(self.device)
        shares = self.shares
        if tensor.is_leaf:
            if id(tensor) not in self._adopted and not accumulates_gradient(tensor):
                return tensor
            if self._adopt(tensor):
                return self.alias(tensor)
        else:
            with WithoutTorchFunctions():  # a recorder need not know
                node = tensor.grad_fn
            if isinstance(node, (_REPLICATED, GATHERED)) or (not shares.exact and self._adopts_leaves_of(node)):
                return tensor

        def replicate(tensors: list[Tensor]) -> Any:  # an alias for each share
            with torch.inference_mode(False), torch.enable_grad():  # as in the share
                return Replicate.apply(shares, tensors[0])

        replicated: Tensor = shares.synchronize(replicate, tensor)
        return replicated

    def _adopt(self, leaf: Tensor) -> bool:
        """Adopt a leaf, and return True; False for rows, and for that of a pass within another one (`replicate`)."""
        if id(leaf) not in self._adopted:
            nested = in_backward() and not (self.shares.exact or isinstance(leaf, nn.Parameter))
            if nested or leaf in self._divided:
                return False
            self.adopt(leaf)
            self.note_averaged(leaf)
        return True

    def note_averaged(self, leaf: Tensor) -> None:
        """Note a leaf whose gradient the strategy averages over ranks, or the node of the tensor that it copies."""
        key = id(leaf)
        self._adopted[key] = ref(leaf, lambda _: self._adopted.pop(key, None))

    def _adopts_leaves_of(self, node: Any) -> bool:
        """Adopt the leaves from which a tensor was computed, by the node of its graph, and return True.

        Returns False if the graph is too large to search, or contains a script's own Function, which may do anything
        to a gradient.
        """
        nodes, seen = [node], 0
        while nodes:
            node = nodes.pop()
            seen += 1
            if isinstance(node, GATHERED):
                continue
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                if not self._adopt(leaf):
                    return False
                continue
            if seen > _MOST_NODES or isinstance(node, BackwardCFunction):
                return False
            nodes += [following for following, _ in node.next_functions if following is not None]
        return True

    def divide_gradient(self, rows: Tensor) -> None:
        """Divide the gradient of a batch that is a leaf by the number of ranks; `rows` are this rank's.

        See the convention in `shares/differentiable.py`.
        """
        if rows in self._divided:
            return
        if self.shares.recorder is not None:
            self.shares.recorder.abandon()
        size = self.ranks.world_size
        with unnumbered():
            self._divided[rows] = handle = register_hook(
                rows, lambda grad: None if grad is None else laid_out_like(grad / size, grad)
            )
        move_hook_first(rows, handle.id)  # the script's, of a parameter that was frozen, get the divided gradient

    def all_sum(self, part: Tensor) -> Tensor:
        """All-reduce (sum) every rank's `part`, with gradients."""
        autocast = _autocast_dtype(part)

        def again(part: Tensor) -> Tensor:
            if _autocast_dtype(part) is not autocast:  # for which the rule may have chosen another type
                raise Outdated
            return self._all_sum(part)

        return self.shares.recorded(again, part)

    def _all_sum(self, part: Tensor) -> Tensor:
        shares = self.shares

        def reduce(parts: list[Tensor]) -> list[Tensor]:
            if any(part.requires_grad for part in parts):
                return [AllReduceSum.apply(shares, *parts)] * len(parts)
            return [shares.total(parts)] * len(parts)

        total: Tensor = shares.synchronize(reduce, part)
        return total


class RowIndependent:
    """The names that the user gave. unused: names of functions that were not called with a batch so far."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self.unused = set(self._names)

    def name_of(self, names: Iterable[str]) -> str | None:
        """Return the first of a function's names that the user gave."""
        name = next((name for name in names if name in self._names), None) if self._names else None
        self.unused.discard(name or "")
        return name


class ParameterView(View):
    """The view of sharded parameters, and of what is computed from them (`duoka.sharding`)."""

    def __init__(
        self,
        ranks: Collectives,
        adopt: Callable[[Tensor], None],
        gradient_norms: Any = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(ranks, adopt)
        self.of_parameters, self.device, self.gradient_norms = True, device, gradient_norms
        # While there are some `viewed`, these are called before a function of shards, and with their rows after one
        # that may write (sharding/views.py).
        self.write_back_views: Callable[[], None] = lambda: None
        self.update_views: Callable[[list[Tensor]], None] = lambda rows: None

    @cached_property
    def on_host(self) -> ParameterView:
        """The view of copies of offloaded parameters that the script has moved to the host."""
        return ParameterView(self.ranks, self.adopt, self.gradient_norms)


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the type of what torch computes in fewer bits on a tensor's device; None without autocast."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def exact_view(
    shares: ExactShares,
    adopt: Callable[[Tensor], None],
    alias: Callable[[int, Tensor], Tensor],
    say: Callable[[str], None],
    leaf_hooks: WeakIdKeyDictionary | None = None,
) -> View:
    """Make a view for each share of this process under `--strategy exact`, and return the last.

    Args:
        shares: the local ones, and how many each process has.
        adopt: as for `View`.
        alias: returns what replaces a leaf in the local share with this index.
        say: as for `View`.
        leaf_hooks: as for `View`.
    """
    siblings: list[View] = []
    for index in range(shares.count):
        View(
            ShareCollectives(shares, index),
            adopt,
            say,
            shares,
            partial(alias, index),
            siblings,
            leaf_hooks=leaf_hooks,
        )
    last = siblings[-1]
    for view in siblings:  # one report of all
        view.say, view.whole_operations = last.say, last.whole_operations
    return last
