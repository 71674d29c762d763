"""The shares of a batch that this process computes: one, or several with the strategy `exact`.

Several shares are computed one after the other, each in a greenlet and with its own `View`, as if each were a rank.
Where ranks would call a collective, a share's greenlet is suspended. When all local shares have reached that point,
their parts are combined, with those of the other processes, and each share continues. So each rule of `view/rules/`
is written for one share.

With every other strategy there is one share, and nothing is suspended: `BatchTensor._shares` is the batch itself,
`each(f)` is `[f(0)]`, `synchronize(f, x)` is `f([x])[0]`, and the ranks of the view are the processes.

Why: docs/decisions/0080-exact.md
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor
from torch.distributed import ReduceOp

from duoka.collectives.base import Collectives
from duoka.collectives.tree_sum import Tree, start_sum
from duoka.private.torch import count_dispatch_modes
from duoka.view.generators import random_marks, random_states, set_random_states
from duoka.view.recent import KEPT, Recent
from duoka.view.shares.partition import Partition

T = TypeVar("T")
Combine = Callable[[list[Any]], Sequence[Any]]  # the parts of all local shares -> the result of each


class Outdated(Exception):
    """A program that was recorded from a rule does not do what the rule would do now."""


class RuleRecorder(Protocol):
    """Records the torch calls of the running rule (`dispatch/replay.py`)."""

    def abandon(self) -> None:
        """Discard the calls recorded so far, and record no more."""

    def calling(self, func: Callable[..., Any], *args: Any) -> Any:
        """Call a function that draws for the whole batch, or calls a collective, and record it as one call."""


class LocalShares:
    """The local shares of a process: one. `ExactShares` has several."""

    count = 1  # local shares
    several = False  # True if some process has several
    exact = False  # True if sums are added in a fixed tree

    def __init__(self, processes: Collectives) -> None:
        self.processes = processes  # collectives between processes
        self.counts: Sequence[int] = (1,) * processes.world_size  # shares of each process
        self.recorder: RuleRecorder | None = None  # of the running rule
        self.draw_cache: Any = None  # of the running call: a DrawCache (rules/draws.py)
        # As in `View`, but for calls with batches of several shares, of which each has a program.
        self.programs, self.calls = Recent(KEPT), Recent(KEPT)

    @cached_property
    def starts(self) -> list[int]:
        """Index of the first share of each process."""
        return [0, *accumulate(self.counts[:-1])]

    @cached_property
    def world_size(self) -> int:
        """Number of shares of all processes."""
        return sum(self.counts)

    @cached_property
    def of_process(self) -> Partition:
        """The partition between processes, of no samples (`Partition.of`)."""
        ranks = self.processes
        return Partition(0, ranks.rank, ranks.world_size, counts=tuple(self.counts))

    def each(
        self, work: Callable[[int], T], draws: bool = False, generators: Sequence[torch.Generator] = ()
    ) -> list[T]:
        """Return `work(index)` for each local share; all must call `synchronize` equally often.

        draws: `work` may draw random numbers; each share starts with the same generator states. generators: those of
        the script from which it may draw.
        """
        return [work(0)]

    def synchronize(self, combine: Combine, part: Any) -> Any:
        """Wait for the other local shares, and return this share's result.

        combine: called once, with the parts of all local shares in order; returns one result for each.
        """
        return combine([part])[0]

    def recorded(self, func: Callable[..., T], *args: Any) -> T:
        """Call a function of the running rule that draws or meets other ranks; recorded, it is one call."""
        return func(*args) if self.recorder is None or self.several else self.recorder.calling(func, *args)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum over all shares of all processes. parts: those of the local shares."""
        return self.processes.all_reduce(parts[0].detach().clone()).data  # which has counted no write

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts of the shares of all processes: shape (world_size, ...). parts: of the local ones."""
        sent = torch.stack([part.detach() for part in parts])
        most = max(self.counts)
        if len(parts) < most:
            sent = torch.cat([sent, sent.new_zeros(most - len(parts), *sent.shape[1:])])
        gathered = self.processes.all_gather(sent)
        if min(self.counts) == most:
            return gathered.view(self.world_size, *parts[0].shape)
        return torch.cat([row[:count] for row, count in zip(gathered, self.counts, strict=True)])


class ExactShares(LocalShares):
    """Shares of a fixed number for the whole run; sums do not depend on which process has which shares."""

    exact = True

    def __init__(self, processes: Collectives, counts: Sequence[int]) -> None:
        super().__init__(processes)
        self.counts, self.count, self.several = counts, counts[processes.rank], max(counts) > 1
        self._tree = Tree(counts)

    def each(
        self, work: Callable[[int], T], draws: bool = False, generators: Sequence[torch.Generator] = ()
    ) -> list[T]:
        if not self.several:
            return [work(0)]
        tasks = [_ShareTask(partial(work, index)) for index in range(self.count)]
        collects = gc.isenabled()
        gc.disable()  # what is garbage for a share is so for all
        try:
            _run_all(tasks, draws, generators)
        finally:
            for task in tasks:
                task.cancel()
            if collects:
                gc.enable()
        return [task.result for task in tasks]

    def synchronize(self, combine: Combine, part: Any) -> Any:
        if not self.several:
            return combine([part])[0]
        parent = getcurrent().parent
        if parent is None or count_dispatch_modes():
            raise AssertionError("a share needs the other shares where it cannot be suspended")
        recorder, self.recorder = self.recorder, None  # the other shares have recorders of their own
        if recorder is not None:
            recorder.abandon()
        result = parent.switch((combine, part))
        self.recorder = recorder
        return result

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        leaves = [part.detach() for part in parts]
        if not leaves[0].is_floating_point() and not leaves[0].is_complex():
            return self.processes.all_reduce(sum(leaves[1:], leaves[0].clone())).data
        sums = self._tree.own_sums(self.processes.rank, leaves)
        total = start_sum(self.processes, self._tree, sums[0][None] if len(sums) == 1 else torch.stack(sums))()
        return total.clone()  # a part of what was gathered: autograd refuses `total += loss` for such a view


class _ShareTask:
    """The computation of one share, which runs from one synchronization to the next."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._greenlet = greenlet(work)
        self._gradients, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.waiting: tuple[Combine, Any] | None = None  # what it passed to `synchronize`; None when it has ended
        self.result: Any = None

    def resume(self, *results: Any) -> None:
        """Run until the next synchronization, or the end."""
        self._run(lambda: self._greenlet.switch(*results))

    def fail(self, error: BaseException) -> None:
        """Raise an error of the synchronization inside the share's computation."""
        self._run(lambda: self._greenlet.throw(error))

    def _run(self, switch: Callable[[], Any]) -> None:
        with torch.inference_mode(self._inference):  # torch keeps these modes for a thread; each share has its own
            torch.set_grad_enabled(self._gradients)
            try:
                out = switch()
            finally:
                self._gradients, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if self._greenlet.dead:
            self.waiting, self.result = None, out
        else:
            self.waiting = out

    def cancel(self) -> None:
        """End a share that is suspended because another one has failed."""
        if self._greenlet:
            self._greenlet.throw(GreenletExit)


def _run_all(tasks: list[_ShareTask], draws: bool, generators: Sequence[torch.Generator]) -> None:
    """Run all tasks in turn until they end. draws, generators: as for `LocalShares.each`."""
    results: list[tuple[Any, ...]] = [()] * len(tasks)
    while True:
        state, mark = (random_states(), random_marks()) if draws else (None, None)
        states = [generator.get_state() for generator in generators]
        failed: Exception | None = None
        for task, result in zip(tasks, results, strict=True):
            for generator, before in zip(generators, states, strict=True):
                generator.set_state(before)
            if state is not None and task is not tasks[0] and mark != random_marks():
                set_random_states(state)
            try:
                task.resume(*result)
            except Exception as error:  # the others may write what this one has written before
                failed = failed or error
        if failed is not None:
            raise failed
        if tasks[0].waiting is None:
            return
        combine, _ = tasks[0].waiting
        try:
            results = [(result,) for result in combine([task.waiting[1] for task in tasks])]  # type: ignore[index]
        except BaseException as error:
            tasks[0].fail(error)
            raise


class ShareCollectives(Collectives):
    """The collectives of one of several shares of a process: each share is a rank.

    index: of the share among the local ones.
    """

    def __init__(self, shares: LocalShares, index: int) -> None:
        self._shares, self.key = shares, shares.processes.key
        self.rank, self.world_size = shares.starts[shares.processes.rank] + index, shares.world_size

    @property
    def isolated(self) -> bool:
        return self._shares.processes.isolated

    @isolated.setter
    def isolated(self, value: bool) -> None:
        self._shares.processes.isolated = value

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        def reduce(parts: list[Tensor]) -> list[None]:
            if op == ReduceOp.SUM:
                total = self._shares.total(parts)
            else:
                choose = torch.maximum if op == ReduceOp.MAX else torch.minimum
                total = parts[0].clone()
                for part in parts[1:]:
                    total = choose(total, part)
                total = self._shares.processes.all_reduce(total, op)
            with torch.no_grad():
                for part in parts:
                    part.copy_(total)
            return [None] * len(parts)

        self._shares.synchronize(reduce, tensor)
        return lambda: None

    def all_gather(self, tensor: Tensor) -> Tensor:
        def gather(parts: list[Tensor]) -> list[Tensor]:
            return [self._shares.gather(parts)] * len(parts)

        return self._shares.synchronize(gather, tensor)  # type: ignore[no-any-return]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        def send(parts: list[Tensor]) -> list[Tensor]:
            rank = bisect_right(self._shares.starts, source) - 1
            mine = parts[source - self._shares.starts[rank]] if rank == self._shares.processes.rank else parts[0]
            sent = self._shares.processes.broadcast(mine.detach().clone(), rank)
            with torch.no_grad():
                return [part.copy_(sent) for part in parts]

        return self._shares.synchronize(send, tensor)  # type: ignore[no-any-return]
