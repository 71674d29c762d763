"""The same bits on any number of devices: a fixed number of shares of each batch, and sums in one fixed tree.

In each share a parameter is replaced by an alias with the parameter's memory. One node of the graph (`Replicate`)
gets the gradients of all own aliases, when autograd has computed them. They are added in a tree, then over ranks, in
buckets during the backward pass, or at once where they are needed at once. Gradients that reach the parameter without
its aliases (a penalty on weights) are equal on every rank already.

Why: docs/decisions/0080-exact.md
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from duoka.collectives.base import Collectives
from duoka.collectives.tree_sum import Tree, start_sum
from duoka.errors import Refused
from duoka.private.torch import accumulates_gradient, add_all_, has_hooks, is_dropped, is_immutable_zero, run_first
from duoka.strategies.buckets import BUCKET_BYTES, Bucketed
from duoka.system import environment
from duoka.view import originals
from duoka.view.originals import unnumbered, when_accumulated
from duoka.view.rules.gradients import call_hooks, gradient_of, rows_of_gradient
from duoka.view.shares.differentiable import Replicate
from duoka.view.shares.local import ExactShares
from duoka.view.tensor.batch import BatchTensor, rows_by_share
from duoka.view.view import View, exact_view


@dataclass(eq=False)
class _Aliases:
    """The aliases of a parameter in a graph, one for each own share; the graph refers to this object."""

    parameter: ReferenceType[Tensor]
    index: int | None
    tensors: Sequence[ReferenceType[Tensor]] = ()

    def follow(self) -> None:
        """Give them the memory that the parameter has now, also in what autograd has saved."""
        if (parameter := self.parameter()) is not None:
            _follow([alias for tensor in self.tensors if (alias := tensor()) is not None], parameter)


class Exact(Bucketed):
    """Parameters replicated on every rank; gradients are sums over shares, in one order.

    counts: shares of every batch that each rank computes: together a power of two.
    """

    def __init__(
        self,
        ranks: Collectives,
        counts: Sequence[int],
        bucket_bytes: int = BUCKET_BYTES,
        rng_digest: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(ranks, bucket_bytes, rng_digest)
        self._shares, self._tree = ExactShares(ranks, counts), Tree(counts)
        self._nodes = self._tree.nodes[ranks.rank]
        self._current: dict[int, tuple[_Aliases, tuple[Tensor, ...]]] = {}  # by id of the parameter
        self._aliases: WeakSet[_Aliases] = WeakSet()
        self._places = count()  # of the nodes of aliases, in the order in which they are run
        self._sums: dict[int, list[Tensor]] = {}  # of own subtrees, in the current pass, by index of a parameter
        self._inner = 0  # passes that are inside the current one, or return gradients
        self._at_once = False  # whether gradients are whole as soon as they are computed
        self._leaf_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # batch -> _LeafHooks
        self._hooked: list[Tensor] = []  # which the next pass may reach though the script no longer names them

    def view(self, ranks: Collectives, say: Callable[[str], None]) -> View:
        return exact_view(self._shares, self.adopt, self.alias, say, self._leaf_hooks)

    # --- aliases

    def alias(self, share: int, leaf: Tensor) -> Tensor:
        """Return the alias of a parameter in a local share, by its index; other leaves are returned as they are."""
        if not leaf.requires_grad:
            return leaf
        known = self._current.get(id(leaf))
        if known is None or known[0].parameter() is not leaf or not _follow(known[1], leaf):
            if isinstance(leaf, nn.Parameter):
                self.adopt(leaf)  # it was frozen before, or is new
            # First, aliases of a former shape must go: they keep the node that accumulates gradients of that shape.
            self._current.pop(id(leaf), None)
            del known
            known = self._current[id(leaf)] = self._made(leaf, self._index.get(leaf))
        return known[1][share]

    def _made(self, parameter: Tensor, index: int | None) -> tuple[_Aliases, tuple[Tensor, ...]]:
        known = _Aliases(ref(parameter), index)
        with unnumbered(), torch.enable_grad():
            tensors: tuple[Tensor, ...] = Replicate.apply(self._shares, parameter, partial(self._keep, known))
        run_first(tensors[0].grad_fn, next(self._places))
        known.tensors = [*map(ref, tensors)]
        self._aliases.add(known)
        return known, tensors

    def _register(self, parameter: Tensor, index: int) -> None:
        self._hooks.append(originals.register_hook(parameter, unserializable_hook(partial(self._arrive, index))))

    # --- a pass

    def read_in_pass(self) -> None:
        self._at_once = True

    def note_type(self, parameter: Tensor) -> None:
        self._current.pop(id(parameter), None)  # aliases lead to the node that has accumulated its gradient so far

    @contextmanager
    def returning(self) -> Iterator[None]:
        self._inner += 1
        try:
            yield
        finally:
            self._inner -= 1

    @contextmanager
    def backward(self, site: str) -> Iterator[None]:
        if self._pass is not None:
            with self.returning():
                yield
            return
        self._sums.clear()
        for known in self._aliases:
            known.follow()
        try:
            with self._with_hooks(), super().backward(site):
                yield
        finally:
            for key in [key for key, (known, _) in self._current.items() if is_dropped(known.parameter)]:
                del self._current[key]  # which alone keeps a parameter that the script has dropped

    def _keep(self, known: _Aliases, grads: Sequence[Tensor | None]) -> bool:
        """Add up the gradients of own shares for a bucket; called by autograd when all have arrived.

        Returns False if the whole gradient is needed at once: a hook gets it, it is returned, or differentiated.
        """
        parameter, index = known.parameter(), known.index
        assert parameter is not None  # the node refers to it
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise Refused("sparse gradients (nn.Embedding(sparse=True)) cannot be added up share by share yet")
        inside = self._pass is not None and not self._inner
        if index is None or not inside or self._at_once or torch.is_grad_enabled() or has_hooks(parameter, others=1):
            return False
        if parameter.requires_grad:  # else frozen since its use, it gets no gradient
            sums = self._tree.own_sums(
                self._ranks.rank, (torch.zeros_like(parameter) if grad is None else grad for grad in grads)
            )
            if index in self._sums:  # of another graph that this one contains
                sums = [*map(torch.add, self._sums[index], sums)]
            self._sums[index] = sums
            self._follow_stream(sums)
        return True

    def _arrive(self, index: int, _: Tensor | None) -> None:
        """Send what `_keep` has kept; called by autograd when it adds to the parameter's `.grad`."""
        if index in self._sums and not self._inner:
            self._mark_ready(index)

    def _local_gradients(self, index: int) -> list[Tensor]:
        info = self._infos[index]
        sums = self._sums.get(index)
        return sums or [torch.zeros(info.shape, dtype=info.dtype, device=info.device) for _ in self._nodes]

    def _flat(self, members: list[int], report: Tensor) -> Tensor:
        """Return a row for each subtree of this rank, shape (subtrees, entries); the first has the report."""
        gradients = [self._local_gradients(index) for index in members]
        reports = [report, *(torch.zeros_like(report) for _ in self._nodes[1:])]
        nodes = zip(*gradients, reports, strict=True)
        rows = [torch.cat([*(part.reshape(-1) for part in parts), end]) for *parts, end in nodes]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def _start_reduction(self, flat: Tensor, members: list[int], report: int) -> Callable[[], Tensor]:
        return start_sum(self._ranks, self._tree, flat)

    def _store_gradients(self, gradients: dict[int, Tensor]) -> None:
        targets, sources = [], []
        for index, total in gradients.items():
            parameter = self._infos[index].tensor()
            if parameter is None:
                continue
            mean = torch.empty_like(parameter).copy_(total).div_(self._shares.world_size)  # exact: a power of two
            if parameter.grad is None or is_immutable_zero(parameter.grad):
                parameter.grad = mean
            else:
                targets.append(parameter.grad)
                sources.append(mean)
        if targets:
            with torch.no_grad():
                add_all_(targets, sources)
        self._sums.clear()

    # --- what a script may do with gradients

    @contextmanager
    def no_sync(self, parameters: Iterable[Tensor] | None = None) -> Iterator[None]:
        """Do nothing: sums over passes have the same bits only if each pass is averaged before it is added."""
        yield

    def register_hook(self, leaf: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        """Register a hook for the whole gradient."""
        if not isinstance(leaf, BatchTensor):
            return originals.register_hook(leaf, hook)  # whole already: every share's part is added before
        rows = rows_by_share(leaf)[0]
        if not rows.requires_grad or not accumulates_gradient(rows):  # torch refuses the former
            return originals.register_hook(rows, hook)
        if leaf not in self._leaf_hooks:
            self._leaf_hooks[leaf] = _LeafHooks(leaf)
        hooks = self._leaf_hooks[leaf]
        self._hooked.append(leaf)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    @contextmanager
    def _with_hooks(self) -> Iterator[None]:
        hooked = [(leaf, hooks) for leaf, hooks in self._leaf_hooks.items() if hooks]
        for leaf, hooks in hooked:
            hooks.begin(leaf)
        try:
            yield
        finally:
            for leaf in self._hooked:
                if self._leaf_hooks[leaf].waits:  # for a later pass: autograd keeps the rows, and these the leaf
                    leaf._shares[0]._rows.duoka_leaf = leaf  # type: ignore[attr-defined]
            self._hooked.clear()
            for leaf, hooks in hooked:
                hooks.end(leaf)


class _LeafHooks(OrderedDict[int, Callable[[Tensor], Any]]):
    """The script's hooks on a batch that is a leaf, of several shares."""

    def __init__(self, batch: BatchTensor) -> None:
        self._shares, self._missing, self.waits = len(batch._shares), 0, True  # until the hooks are called
        self._before: Tensor | None = None
        with unnumbered():
            for rows in rows_by_share(batch):
                when_accumulated(rows, partial(self._arrive, ref(batch)))

    def begin(self, batch: BatchTensor) -> None:
        """Begin a pass, or another gradient in it: set the gradient of earlier ones aside."""
        self._missing, self._before, batch.grad = self._shares, batch.grad, None

    def end(self, batch: BatchTensor) -> None:
        """End a pass: what has arrived of an incomplete gradient is dropped."""
        batch.grad, self._before = self._before, None

    def _arrive(self, batch: ReferenceType[BatchTensor], _: Tensor) -> None:
        """Call the hooks when the gradients of all own shares have arrived; called by autograd."""
        self._missing -= 1
        leaf = batch()
        if len(self) and self._missing == 0 and leaf is not None:
            self.waits = False
            grad: Any = leaf.grad
            earlier = self._before
            leaf.grad = earlier  # as hooks see it, and as it stays if one raises an error
            changed = call_hooks(self, grad)
            if changed is not grad:  # its rows have a graph if the pass makes one
                metas = [share._meta for share in leaf._shares]
                grad = gradient_of(metas, rows_of_gradient(changed, leaf), accumulated=True)
            if earlier is None:
                leaf.grad = grad.clone()  # the script may hold it
            else:
                leaf.grad = earlier + grad if torch.is_grad_enabled() else earlier.add_(grad)
            self.begin(leaf)


def _follow(aliases: Sequence[Tensor], parameter: Tensor) -> bool:
    """Give aliases the memory of a parameter that has got another, by `parameter.data = ...`.

    Returns False if it has got another shape or type.
    """
    for alias in aliases:
        if alias.shape != parameter.shape or alias.dtype != parameter.dtype:
            return False
        if alias.data_ptr() == parameter.data_ptr() and alias.stride() == parameter.stride():
            return True
        alias.data = parameter.detach()
    return True


def be_deterministic(device: torch.device) -> None:
    """Let each operation give the same bits each time; torch raises an error for one that cannot.

    On CPUs all can: torch names `put_`, whose bits depend on the number of threads alone, which exact keeps the same.
    """
    environment.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first use of a GPU
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs time
    # The attributes may be frozen (torch.backends.disable_global_flags).
    torch.backends.cudnn.set_flags(_benchmark=False, _deterministic=True, _fp32_precision=None)
