"""The same bits on any number of devices: a fixed number of shares of each batch, and sums in one fixed tree.

In each share a parameter is replaced by an alias: a leaf with the parameter's memory and a gradient of its own. When
the gradients of all own shares are computed they are added in a tree, then over ranks, in buckets, during the
backward pass. Gradients that reach the parameter without its aliases (a penalty on weights) are equal on every rank
already.

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
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from duoka.collectives.base import Collectives
from duoka.collectives.tree_sum import Subtrees, Tree, start_sum
from duoka.errors import Refused
from duoka.private.torch import accumulates_gradient, add_all_
from duoka.strategies.buckets import BUCKET_BYTES, Bucketed
from duoka.system import environment
from duoka.system.user_code import user_line
from duoka.view import originals
from duoka.view.originals import unnumbered, when_accumulated
from duoka.view.rules.gradients import call_hooks
from duoka.view.tensor.batch import BatchTensor, gather_all
from duoka.view.view import View, exact_view


@dataclass(slots=True)
class _Aliases:
    """The aliases of a parameter, one for each own share."""

    tensor: ReferenceType[Tensor]
    index: int
    aliases: list[Tensor]


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
        self._counts, self._count, self._first = counts, counts[ranks.rank], sum(counts[: ranks.rank])
        self._tree = Tree(counts)
        self._nodes = self._tree.nodes[ranks.rank]
        self._aliases_of: dict[int, _Aliases] = {}  # by id of the parameter
        self._aliases: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sums: dict[int, Subtrees] = {}  # of the current pass
        self._own_hooks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of the script's, by tensor
        self._hooked: list[Tensor] = []  # which the next pass may reach though the script no longer names them
        self._reached: dict[int, int] = {}  # leaf by identity -> its place in the order of the current pass
        self._places = count()

    def view(self, ranks: Collectives, say: Callable[[str], None]) -> View:
        return exact_view(ranks, self._counts, self.adopt, self.alias, self.is_alias, say, self._own_hooks)

    # --- aliases

    def alias(self, share: int, leaf: Tensor) -> Tensor:
        """Return the alias of a parameter in a local share, by its index; other leaves are returned as they are."""
        aliases_of_leaf = self._aliases_of.get(id(leaf))
        if not leaf.requires_grad:
            return leaf
        if aliases_of_leaf is None or aliases_of_leaf.tensor() is not leaf:
            if not isinstance(leaf, nn.Parameter):
                return leaf
            self.adopt(leaf)  # it was frozen before, or is new
            aliases_of_leaf = self._aliases_of[id(leaf)]
        self._follow(aliases_of_leaf, leaf)
        return aliases_of_leaf.aliases[share]

    def _follow(self, known: _Aliases, leaf: Tensor) -> None:
        """Give the aliases the memory of a parameter that has got another, by `parameter.data = ...`."""
        first = known.aliases[0]
        if first.shape != leaf.shape or first.dtype != leaf.dtype:
            known.aliases = self._made(leaf, known.index)
        elif first.data_ptr() != leaf.data_ptr():  # also in what autograd has saved
            for alias in known.aliases:
                alias.data = leaf.detach()

    def is_alias(self, leaf: Tensor) -> bool:
        """Return whether a leaf is an alias."""
        return leaf in self._aliases

    def _register(self, parameter: Tensor, index: int) -> None:
        aliases = self._made(parameter, index)
        # By a function that all ranks compute whole, not by way of its aliases.
        self._hooks.append(when_accumulated(parameter, partial(self._reach, id(parameter))))
        self._aliases_of[id(parameter)] = _Aliases(ref(parameter), index, aliases)

    def _made(self, parameter: Tensor, index: int) -> list[Tensor]:
        aliases = [parameter.detach().requires_grad_() for _ in range(self._count)]
        for share, alias in enumerate(aliases):
            self._aliases[alias] = None
            when_accumulated(alias, partial(self._arrive, index, share))
        return aliases

    # --- a pass

    @contextmanager
    def backward(self, site: str) -> Iterator[None]:
        if self._pass is not None:
            yield
            return
        self._sums.clear()
        for known in self._aliases_of.values():
            if (parameter := known.tensor()) is not None:
                self._follow(known, parameter)
        with self._with_hooks(), super().backward(site):
            yield
            for index in [index for index in self._sums if index not in self._pass.ready]:  # type: ignore[attr-defined]
                self._mark_ready(index)  # reached by some own shares only

    def _arrive(self, index: int, share: int, alias: Tensor) -> None:
        """Add the gradient of one share; called by autograd."""
        gradient, alias.grad = alias.grad, None
        if gradient is None:  # as a norm's bias in a second backward pass, on which nothing depends
            return
        if self._pass is None:
            raise Refused("a backward pass began outside of torch.autograd.backward")
        parameter = self._infos[index].tensor()
        if parameter is None or not parameter.requires_grad:  # frozen since its use, it gets no gradient
            return
        if gradient.is_sparse:
            raise Refused("sparse gradients (nn.Embedding(sparse=True)) cannot be added up share by share yet")
        known = self._sums.setdefault(index, Subtrees(self._nodes))
        if index in self._pass.ready or known.has(self._first + share):
            raise Refused(f"the backward pass at {user_line()} reaches a parameter twice; use another strategy")
        with torch.no_grad():
            if known.put(self._first + share, gradient.detach()):
                self._mark_ready(index)
                self._reach(id(parameter))

    def _reach(self, leaf: int, *_: Tensor) -> None:
        """Note the place of a leaf, by its identity, in the order of the pass; also called by autograd."""
        self._reached[leaf] = next(self._places)

    def _place(self, order: dict[int, int], parameter: Tensor) -> int | None:
        return self._reached.get(id(parameter), super()._place(order, parameter))

    def _local_gradients(self, index: int) -> list[Tensor]:
        info = self._infos[index]

        def zero() -> Tensor:
            return torch.zeros(info.shape, dtype=info.dtype, device=info.device)

        return self._sums.get(index, Subtrees(self._nodes)).totals(zero)

    def _flat(self, members: list[int], report: Tensor) -> Tensor:
        """Return a row for each subtree of this rank, shape (subtrees, entries); the first has the report."""
        gradients = [self._local_gradients(index) for index in members]
        reports = [report, *(torch.zeros_like(report) for _ in self._nodes[1:])]
        rows = [torch.cat([*(sums.pop(0).reshape(-1) for sums in gradients), of_row]) for of_row in reports]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def _start_reduction(self, flat: Tensor, members: list[int], report: int) -> Callable[[], Tensor]:
        return start_sum(self._ranks, self._tree, flat)

    def _store_gradients(self, gradients: dict[int, Tensor]) -> None:
        targets, sources = [], []
        for index, total in gradients.items():
            parameter = self._infos[index].tensor()
            if parameter is None:
                continue
            mean = torch.empty_like(parameter).copy_(total).div_(sum(self._counts))  # exact: a power of two
            if parameter.grad is None:
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
        """Register a hook for the whole gradient: of a leaf, it is called when the pass is over."""
        rows = leaf._shares[0]._local if isinstance(leaf, BatchTensor) else leaf
        if not rows.requires_grad or not accumulates_gradient(rows):  # torch refuses the former
            return originals.register_hook(rows, hook)  # whole already: every share's part is added before
        if leaf not in self._own_hooks:
            with unnumbered():
                when_accumulated(rows, partial(self._reach, id(leaf)))  # not by way of its aliases
        hooks = self._own_hooks.setdefault(leaf, OrderedDict())
        self._hooked.append(leaf)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    @contextmanager
    def _with_hooks(self) -> Iterator[None]:
        self._reached.clear()
        hooked = [(leaf, hooks) for leaf, hooks in self._own_hooks.items() if hooks]
        before = [leaf.grad for leaf, _ in hooked]
        for leaf, _ in hooked:
            leaf.grad = None
        try:
            yield
        finally:
            self._hooked.clear()
            last = next(self._places)
            grads = [leaf.grad for leaf, _ in hooked]
            for (leaf, _), earlier in zip(hooked, before, strict=True):
                leaf.grad = earlier  # as hooks see it, and as it stays if one raises an error
            waiting = [*zip(hooked, before, grads, strict=True)]
            waiting.sort(key=lambda of: self._reached.get(id(of[0][0]), last))
            with torch.no_grad():  # as in the pass
                for (leaf, hooks), earlier, grad in waiting:
                    if grad is None:
                        continue
                    changed = call_hooks(hooks, grad)
                    grad = grad if changed is grad else gather_all(changed)
                    leaf.grad = grad.clone() if earlier is None else earlier.add_(grad)  # the script may hold it


def be_deterministic(device: torch.device) -> None:
    """Let each operation give the same bits each time; torch raises an error for one that cannot.

    On CPUs all can: torch names `put_`, whose bits depend on the number of threads alone, which exact keeps the same.
    """
    environment.set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first use of a GPU
    torch.use_deterministic_algorithms(True, warn_only=device.type == "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # only costs time
    # The attributes may be frozen (torch.backends.disable_global_flags).
    torch.backends.cudnn.set_flags(_benchmark=False, _deterministic=True, _fp32_precision=None)
