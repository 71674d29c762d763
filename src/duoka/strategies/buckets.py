"""Average gradients in buckets during the backward pass.

The method is DistributedDataParallel's (Li et al., "PyTorch Distributed", VLDB 2020). Its reducer expects one forward
and one backward pass of one module; this one expects neither: any graph may end in the parameters (two models,
several backward passes, parameters outside of modules).

The last pass that began at the same line predicts which parameters a pass reaches, and in which order. Each pass ends
with an agreement of all ranks on it: a parameter that only some ranks reached is summed all the same.

Why: docs/decisions/0012-gradients-without-a-wrapper.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from duoka.collectives.base import Collectives
from duoka.errors import DuokaError, RanksApart, Refused
from duoka.hardware import accelerator
from duoka.private.torch import accumulates_gradient, is_dtensor, transform_level
from duoka.strategies.base import Observer, Strategy
from duoka.system.user_code import user_line
from duoka.view import originals
from duoka.view.originals import unnumbered
from duoka.view.shares.differentiable import AllReduceSum
from duoka.view.shares.local import LocalShares
from duoka.view.tensor.batch import BatchTensor

_EXACT = ("cpu", torch.float32)  # represents sums of 16-bit numbers exactly, over up to so many ranks:
_EXACT_RANKS = 256
_DIGEST = 0xFFFF  # the bits of a checksum that are compared

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default


@dataclass(slots=True)
class ParameterInfo:
    """A parameter's properties, known on all ranks, also if it was deleted on this one."""

    tensor: Callable[[], Tensor | None]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def update(self) -> None:
        """Update the properties, which `parameter.data = ...` changes."""
        parameter = self.tensor()
        if parameter is not None:
            self.shape, self.dtype, self.device = parameter.shape, parameter.dtype, parameter.device


def _gone() -> None:
    """Return what a reference to a deleted parameter does."""


class _SentBucket(NamedTuple):
    """A bucket being summed; the report of the pass follows the gradients in the last bucket."""

    members: list[int]
    wait: Callable[[], Tensor]  # waits for the sum if it is not there yet, and returns it


@dataclass(frozen=True, slots=True)
class WholeHook:
    """A hook on a tensor that every rank holds whole. hook: the script's, called with the whole batch's gradient."""

    hook: Callable[[Any], Any]
    ranks: Collectives

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Return the gradient for this rank. grad: None on all ranks if a script's own Function returns None."""
        if grad is None or transform_level() is not None:  # torch.func is given whole tensors
            return self.hook(grad)  # type: ignore[no-any-return]
        # Averaging it here makes the average at the end of the pass change nothing.
        total: Tensor = AllReduceSum.apply(LocalShares(self.ranks), grad) / self.ranks.world_size  # differentiable
        changed = self.hook(total)
        return total if changed is None else changed


class _Pass:
    """One backward pass. strategy: whose parameters it reaches. buckets: those expected, of parameters by number."""

    def __init__(self, strategy: Bucketed, buckets: list[list[int]]) -> None:
        self._strategy, self._ranks, self._infos = strategy, strategy._ranks, strategy._infos
        self._buckets = buckets
        self._bucket_of = {index: number for number, members in enumerate(buckets) for index in members}
        self._pending = [len(members) for members in buckets]  # per bucket, number of gradients not computed yet
        self._sent: list[_SentBucket] = []
        self._unplanned: set[int] = set()  # reached but not planned, or again after being sent
        self.ready: dict[int, int] = {}  # parameter whose gradient is computed -> position in order
        self.sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()  # sharded ones that were reached -> their places
        self.places = count()
        self.sparse: set[int] = set()  # those whose gradient is sparse
        # In which gradients are summed; autograd computes them in those of the forward pass.
        self._stream = accelerator.current_stream()

    def follow_stream(self, gradients: Iterable[Tensor | None]) -> None:
        """Let the stream of the pass wait for the current one, which has computed gradients, if it is another."""
        if self._stream is None:
            return
        current = accelerator.current_stream()
        if current is not None and current != self._stream:
            self._stream.wait_stream(current)
            for gradient in gradients:
                if gradient is not None and gradient.device == self._stream.device and not gradient.is_sparse:
                    gradient.record_stream(self._stream)

    def mark_ready(self, index: int) -> None:
        """Record that a parameter's gradient is computed, and send the buckets that are complete."""
        if self._strategy._is_sparse(index):
            self.sparse.add(index)
            return
        again = index in self.ready
        self.ready.setdefault(index, len(self.ready))  # again: of another part of the graph, or of an inner pass
        number = self._bucket_of.get(index)
        if number is None or (again and number < len(self._sent)):
            self._unplanned.add(index)
        elif not again:
            self._pending[number] -= 1
            # In order, and the last one only at the end, with the report.
            while len(self._sent) < len(self._buckets) - 1 and not self._pending[len(self._sent)]:
                self._sent.append(self._send(self._buckets[len(self._sent)]))

    def finish(self, unsynced: Iterable[int]) -> list[list[int]]:
        """Complete all buckets; return those to expect next time.

        unsynced: parameters whose gradients stayed local before, and are averaged with the others now.
        """
        for index in unsynced:
            if self._strategy._is_sparse(index):
                self.sparse.add(index)
            elif index not in self.ready:
                self.ready[index] = len(self.ready)
                if index not in self._bucket_of:
                    self._unplanned.add(index)
        buckets = self._buckets or [[]]
        while len(self._sent) < len(buckets) - 1:
            self._sent.append(self._send(buckets[len(self._sent)]))
        planned = [index for bucket in buckets for index in bucket]
        report = [float(index in self.ready) for index in planned]
        report += [float(len(self._unplanned | (self.sparse - self._strategy._sparse)))]
        reached, others = self._send_report(buckets[-1], [*report, float(self._strategy._rng_digest() & _DIGEST)])
        if not others:
            self._strategy._store_gradients(self._gradients(reached))
            still_planned = [index for index in planned if index in reached]
            return self._buckets if len(reached) == len(planned) else self._strategy._buckets_of(still_planned)
        extra, order = self._agree()
        for bucket in self._strategy._buckets_of(extra):
            sent_bucket = self._send(bucket)
            sent_bucket.wait()
            self._sent.append(sent_bucket)  # overrides an earlier one that was sent too early
        self._strategy._store_gradients(self._gradients(set(order)))
        return self._strategy._buckets_of(order)

    def _send_report(self, last: list[int], report: list[float]) -> tuple[set[int], bool]:
        """Send the last bucket and wait for all.

        Returns the planned parameters that any rank reached, and whether any rank reached others. The report is part
        of the last bucket, unless reading it would make the script wait for its GPU, or the bucket's dtype cannot
        represent its numbers.
        """
        in_bucket = self._ranks.world_size <= _EXACT_RANKS and (not last or self._strategy._holds_numbers(last[0]))
        if in_bucket or last:
            self._sent.append(self._send(last, report if in_bucket else []))
        for sent_bucket in self._sent:
            sent_bucket.wait()
        if in_bucket:
            totals = self._sent[-1].wait()[-len(report) :]
        else:
            totals = self._ranks.all_reduce(torch.tensor(report, dtype=torch.float64, device="cpu"))
        *reached, unplanned, digests = totals.tolist()
        # If digests differ, that of at least one rank differs from their mean, and this rank's error ends all.
        if digests != report[-1] * self._ranks.world_size:
            raise RanksApart(
                f"the ranks' random states differ at {user_line()}: something draws random numbers on one rank that "
                "it does not draw on another (a layer that is skipped at random?); try --randomness worker"
            )
        planned = [index for sent_bucket in self._sent for index in sent_bucket.members]
        return {index for index, flag in zip(planned, reached, strict=True) if flag}, bool(unplanned)

    def _send(self, members: list[int], report: list[float] | None = None) -> _SentBucket:
        """Begin to sum the gradients of one bucket."""
        for index in members:
            self._infos[index].update()
        first = self._infos[members[0]] if members else None
        dtype, device = (first.dtype, first.device) if first else (torch.float32, torch.device("cpu"))
        with self._stream or nullcontext():
            flat = self._strategy._flat(members, torch.tensor(report or [], dtype=dtype, device=device))
            return _SentBucket(members, cache(self._strategy._start_reduction(flat, members, len(report or []))))

    def _gradients(self, reached: set[int]) -> dict[int, Tensor]:
        """Return the summed gradients of the parameters that any rank reached."""
        gradients = {}
        for sent_bucket in self._sent:
            sizes = [self._infos[index].shape.numel() for index in sent_bucket.members]
            parts = sent_bucket.wait()[: sum(sizes)].split(sizes)
            for index, part in zip(sent_bucket.members, parts, strict=True):
                if index in reached:
                    gradients[index] = part.view(self._infos[index].shape)
        return gradients

    def _agree(self) -> tuple[list[int], list[int]]:
        """Return the unplanned parameters of any rank, and all parameters reached, in rank 0's order."""
        count = len(self._infos)
        mine = torch.full((4, count), -1)
        for index, position in self.ready.items():
            mine[0, index] = position
        for index in self._unplanned:
            mine[1, index] = 1
        for index, info in enumerate(self._infos):
            mine[2, index] = info.tensor() is not None
            mine[3, index] = index in self.sparse or index in self._strategy._sparse
        positions, unplanned, alive, sparse = self._ranks.all_gather(mine).unbind(1)
        self._strategy._free = (~(alive > 0).any(0)).nonzero().flatten().tolist()
        found_sparse = (sparse > 0).any(0).nonzero().flatten().tolist()
        self._strategy._sparse = set(found_sparse).difference(self._strategy._free)
        order = [index for index in range(count) if bool((positions[:, index] >= 0).any())]
        # Those that rank 0 did not reach come last, in the order of adoption.
        order.sort(key=lambda index: (int(positions[0, index]) < 0, int(positions[0, index])))
        return [index for index in order if bool((unplanned[:, index] > 0).any())], order


class Bucketed(Strategy):
    """Records which parameters a backward pass reaches, and sums the ranks' parts of their gradients.

    How gradients are found, summed and stored is each strategy's: `_register`, `_flat`, `_start_reduction`,
    `_store_gradients`.

    bucket_bytes: size of a bucket. rng_digest: returns a checksum of this rank's random state, which must be equal on
    all ranks at the end of every pass.
    """

    def __init__(self, ranks: Collectives, bucket_bytes: int, rng_digest: Callable[[], int]) -> None:
        self._ranks, self._rng_digest, self._bucket_bytes = ranks, rng_digest, bucket_bytes
        self._infos: list[ParameterInfo] = []
        self._free: list[int] = []  # indices of parameters deleted on all ranks
        self._index: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._frozen: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._plans: dict[str, list[list[int]]] = {}
        self._pass: _Pass | None = None
        self._hooks: list[Any] = []
        self._no_sync: set[int] = set()  # parameters whose gradients stay local now
        self._sparse: set[int] = set()  # parameters whose gradients have been sparse on any rank
        self._unsynced: set[int] = set()  # those whose gradients stayed local before, and are to be averaged
        self._reads_each_pass = False  # whether the script reads gradients after each pass, also in no_sync
        self._observers: list[Observer] = []

    @abstractmethod
    def _register(self, parameter: Tensor, index: int) -> None:
        """Arrange that `_mark_ready(index)` is called when the gradient of a new parameter is computed."""

    @abstractmethod
    def _flat(self, members: list[int], report: Tensor) -> Tensor:
        """Return this rank's part of the gradients of `members` and a report, in one new tensor."""

    @abstractmethod
    def _start_reduction(self, flat: Tensor, members: list[int], report: int) -> Callable[[], Tensor]:
        """Begin to sum a bucket over ranks: the gradients of `members`, then `report` numbers of a report."""

    @abstractmethod
    def _store_gradients(self, gradients: dict[int, Tensor]) -> None:
        """Store the summed gradients, views of their buckets, in the parameters' `.grad`; keys: their indices."""

    def _is_sparse(self, index: int) -> bool:
        """Return whether a parameter's gradient is sparse, and so not in a bucket."""
        return False

    def _holds_numbers(self, index: int) -> bool:
        """Return whether the dtype of this parameter's bucket represents the report's numbers exactly."""
        info = self._infos[index]
        return (info.device.type, info.dtype) == _EXACT

    def leave(self, parameter: Tensor) -> None:
        """Forget a parameter that has become a sharded one."""
        index = self._frozen.pop(parameter, self._index.pop(parameter, None))
        if index is not None:  # buckets that were planned before contain it: its gradient is no longer a local one
            self._infos[index].tensor = _gone

    def adopt(self, parameter: Tensor) -> None:
        if isinstance(parameter, BatchTensor) or is_dtensor(parameter):  # sharding/block.py, or torch, does it
            return
        if parameter in self._index or not parameter.is_leaf:
            return
        if is_lazy(parameter) or parameter.is_meta:  # has no values yet
            return
        if not parameter.requires_grad:
            if parameter not in self._frozen:  # it may require a gradient later
                self._frozen[parameter] = self._numbered(parameter)
            return
        if not accumulates_gradient(parameter):
            return
        index = self._frozen.pop(parameter, None)
        index = self._index[parameter] = self._numbered(parameter) if index is None else index
        with unnumbered():
            self._register(parameter, index)

    def _numbered(self, parameter: Tensor) -> int:
        """Make a new parameter equal on all ranks, and return its number.

        A frozen one gets it at once: when it is thawed, it may be garbage that only some ranks still have.
        """
        info = ParameterInfo(ref(parameter), parameter.shape, parameter.dtype, parameter.device)
        if self._free:
            index = self._free.pop(0)
            self._infos[index] = info
        else:
            index = len(self._infos)
            self._infos.append(info)
        self._ranks.broadcast_into(parameter, 0)
        return index

    def reach(self, parameter: Tensor) -> None:
        """Note that the pass reached a sharded parameter, for observers."""
        if self._pass is not None:
            self._pass.sharded[parameter] = next(self._pass.places)  # its last gradient makes it whole

    def _known(self, parameters: Iterable[Tensor]) -> set[int]:
        return {self._index[parameter] for parameter in parameters if parameter in self._index}

    @contextmanager
    def no_sync(self, parameters: Iterable[Tensor] | None = None) -> Iterator[None]:
        if self._reads_each_pass:
            yield
            return
        before = self._no_sync
        self._no_sync = before | (set(range(len(self._infos))) if parameters is None else self._known(parameters))
        try:
            yield
        finally:
            self._no_sync = before

    def register_hook(self, leaf: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        return originals.register_hook(leaf, WholeHook(hook, self._ranks))

    def read_each_pass(self, parameter: Tensor) -> None:
        self._reads_each_pass = True
        super().read_each_pass(parameter)

    def observe(self, observer: Observer) -> None:
        self._observers.append(observer)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def backward(self, site: str) -> Iterator[None]:
        if self._pass is not None:  # a nested pass (checkpointed activations)
            yield
            return
        for parameter in [p for p in self._frozen if p.requires_grad]:
            self.adopt(parameter)  # thawed since the last pass
        synced = not self._no_sync
        self._pass = _Pass(self, self._plans.get(site, []) if synced else [])
        try:
            try:
                yield
            except (DuokaError, torch.OutOfMemoryError):  # of this rank: the others would wait for its gradients
                raise
            except Exception:  # which the script may catch: average what one device has added up before it
                with suppress(Exception):
                    self._finish(self._pass, synced)
                raise
            plan = self._finish(self._pass, synced)
            if synced:
                self._plans[site] = plan
        finally:
            self._pass = None

    def _place(self, order: dict[int, int], parameter: Tensor) -> int | None:
        """Return the place of a parameter in the order of the current pass; None if the pass has not reached it."""
        sharded = self._pass.sharded  # type: ignore[union-attr]
        if parameter in sharded:
            return len(order) + int(sharded[parameter])
        return order.get(self._index.get(parameter, -1))

    def _follow_stream(self, gradients: Iterable[Tensor | None]) -> None:
        if self._pass is not None:
            self._pass.follow_stream(gradients)

    def _mark_ready(self, index: int) -> None:
        """Record that a parameter's gradient is computed; called by autograd."""
        if self._pass is None:
            raise Refused("a backward pass began outside of torch.autograd.backward")
        if index in self._no_sync:
            self._unsynced.add(index)
        else:
            self._pass.mark_ready(index)

    def _finish(self, now: _Pass, synced: bool) -> list[list[int]]:
        """Complete a pass; return the buckets to expect next time. synced: whether to tell observers."""
        unsynced = sorted(self._unsynced - self._no_sync)
        self._unsynced.difference_update(unsynced)
        plan = now.finish(unsynced)
        if self._sparse:
            average_sparse([self._infos[index].tensor() for index in sorted(self._sparse)], self._ranks)
        if synced:
            order = {index: at for at, index in enumerate([*chain.from_iterable(plan), *now.sparse])}
            for observer in self._observers:
                observer(partial(self._place, order))
        return plan

    def _buckets_of(self, order: list[int]) -> list[list[int]]:
        """Group consecutive parameters of one dtype and device into buckets of limited size."""
        buckets: list[list[int]] = []
        room, kind = 0, None
        for index in order:
            info = self._infos[index]
            size = info.shape.numel() * info.dtype.itemsize
            if kind != (info.dtype, info.device) or size > room:
                buckets.append([])
                room, kind = self._bucket_bytes, (info.dtype, info.device)
            buckets[-1].append(index)
            room -= size
        return buckets


# Sparse gradients (`nn.Embedding(sparse=True)`): each rank computes the entries of its rows; all receive all.

_DENSE = -1  # in place of a number of entries


def average_sparse(parameters: Sequence[Tensor | None], ranks: Collectives) -> None:
    """Average the sparse gradients of these parameters over ranks. Every rank calls it.

    A parameter that has no gradient, or was deleted (None), has no entries.

    Raises:
        Refused: the gradient of one is sparse on some ranks and dense on others.
    """
    held = [None if parameter is None or parameter.grad is None else parameter.grad for parameter in parameters]
    grads = [grad.coalesce() if grad is not None and grad.is_sparse else grad for grad in held]
    numbers = torch.tensor([_number(grad) for grad in grads], dtype=torch.long, device="cpu")
    by_parameter = ranks.all_gather(numbers).unbind(1)
    for parameter, mine, grad, counts in zip(parameters, held, grads, by_parameter, strict=True):
        entries = counts.tolist()
        if max(entries) > 0 and min(entries) == _DENSE:
            raise Refused("a gradient is sparse on some ranks and dense on others; use nn.Embedding(sparse=False)")
        if max(entries) <= 0 or parameter is None:
            continue
        with torch.no_grad():
            mean = _mean(parameter, grad, entries, ranks)
        if mine is None:
            parameter.grad = mean
        else:
            mine.data = mean  # the script may hold it


def _number(grad: Tensor | None) -> int:
    return 0 if grad is None else len(grad.values()) if grad.is_sparse else _DENSE


def _mean(parameter: Tensor, grad: Tensor | None, entries: list[int], ranks: Collectives) -> Tensor:
    """Return the mean of all ranks' gradients; entries: their numbers of entries along dimension 0."""
    rows = parameter.new_zeros((max(entries), *parameter.shape[1:]))
    places = torch.zeros(max(entries), dtype=torch.long, device=parameter.device)
    if grad is not None:
        count = len(grad.values())
        places[:count], rows[:count] = grad.indices()[0], grad.values()
    all_places, all_rows = ranks.all_gather(places), ranks.all_gather(rows)
    chosen = torch.cat([all_places[rank, :number] for rank, number in enumerate(entries)])
    values = torch.cat([all_rows[rank, :number] for rank, number in enumerate(entries)])
    total = torch.sparse_coo_tensor(
        chosen[None], values / ranks.world_size, parameter.shape, check_invariants=False, is_coalesced=False
    )
    return total.coalesce()
