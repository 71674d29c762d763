"""The shares of a batch that this process computes: one, or under `--strategy exact` several.

Several are computed one after the other, each as by a rank of its own, with a `View` of its own. Where ranks would
meet (a sum over the batch, a gathering of rows), each waits for the others in a greenlet; when all have come, what
they brought is combined with that of the other processes, and each goes on. So a rule of `view/rules/` is written
for one share, and knows nothing of several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor
from torch.distributed import ReduceOp

from duoka.private.torch import count_dispatch_modes
from duoka.view.collectives import Collectives
from duoka.view.draws import random_states, same_states, set_random_states
from duoka.view.tree import add_up, start_sum

if TYPE_CHECKING:
    from duoka.view.draws import Once
    from duoka.view.replay import Recorder
    from duoka.view.view import View

T = TypeVar("T")
Together = Callable[[list[Any]], Sequence[Any]]  # what all own shares brought -> what each is given


class Shares:
    """One share: what is asked of all own shares is asked of it.

    ranks: the processes. count: shares of each. exact: whether sums are added in a fixed tree. views: one per share.
    """

    count, exact = 1, False
    home: torch.device | None = None  # where what is of all shares is computed, where they are on several devices
    is_alias: Callable[[Tensor], bool] = staticmethod(lambda leaf: False)  # whether a leaf stands for another

    def __init__(self, ranks: Collectives) -> None:
        self.ranks = ranks
        self.views: list[View] = []
        self.recorder: Recorder | None = None  # of the rule that is running
        self.once: Once | None = None  # what was drawn for all own shares of one call

    @property
    def world_size(self) -> int:
        """The shares of all processes."""
        return self.ranks.world_size * self.count

    def each(self, work: Callable[[int], T], draws: bool = False) -> list[T]:
        """`work(place)` for each own share, of which all come to the same meetings.

        draws: it may draw random numbers, each share the same ones.
        """
        return [work(0)]

    def meet(self, together: Together, part: Any) -> Any:
        """Wait for the other own shares; `together` is called once, with the parts of all, in their order."""
        return together([part])[0]

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all shares of all processes, of which `parts` are the own ones'."""
        return self.ranks.all_reduce(parts[0].detach().clone())


class SeveralShares(Shares):
    """Several shares of one process."""

    def __init__(self, ranks: Collectives, count: int) -> None:
        super().__init__(ranks)
        self.count = count

    def each(self, work: Callable[[int], T], draws: bool = False) -> list[T]:
        if self.count == 1:
            return [work(0)]
        turns = [_Turn(partial(work, place)) for place in range(self.count)]
        try:
            _all_to_their_end(turns, draws)
        finally:
            for turn in turns:
                turn.leave()
        return [turn.found for turn in turns]

    def meet(self, together: Together, part: Any) -> Any:
        if self.count == 1:
            return together([part])[0]
        parent = getcurrent().parent
        if parent is None or count_dispatch_modes():
            raise AssertionError("a share came to a meeting where it cannot wait for the others")
        if self.recorder is not None:
            self.recorder.abandon()
        return parent.switch((together, part))


class DeviceShares(SeveralShares):
    """A share on each of several devices of one process.

    home: the device on which they come together.
    """

    def __init__(self, ranks: Collectives, count: int, home: torch.device) -> None:
        super().__init__(ranks, count)
        self.home = home

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        total = parts[0].detach().to(self.home, copy=True)
        for part in parts[1:]:
            total += part.detach().to(self.home)
        return total


class ExactShares(SeveralShares):
    """Several shares, or one of a fixed number; sums over all shares do not depend on who has which."""

    exact = True

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        local = add_up([part.detach() for part in parts])
        if not local.is_floating_point() and not local.is_complex():
            return self.ranks.all_reduce(local)
        return start_sum(self.ranks, local)()


class _Turn:
    """One share's work, from meeting to meeting."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._greenlet = greenlet(work)
        self._gradients = torch.is_grad_enabled()
        self.met: tuple[Together, Any] | None = None
        self.found: Any = None

    def go_on(self, *given: Any) -> None:
        """Work until the next meeting, or the end."""
        self._run(lambda: self._greenlet.switch(*given))

    def fail(self, error: BaseException) -> None:
        """Let the work see what a meeting has raised."""
        self._run(lambda: self._greenlet.throw(error))

    def _run(self, switch: Callable[[], Any]) -> None:
        before = torch.is_grad_enabled()  # is a thread's, and the share's own while it works
        torch.set_grad_enabled(self._gradients)
        try:
            out = switch()
        finally:
            self._gradients = torch.is_grad_enabled()
            torch.set_grad_enabled(before)
        if self._greenlet.dead:
            self.met, self.found = None, out
        else:
            self.met = out

    def leave(self) -> None:
        """End what was begun, where another share has failed."""
        if self._greenlet:
            self._greenlet.throw(GreenletExit)


def _all_to_their_end(turns: list[_Turn], draws: bool) -> None:
    given: list[tuple[Any, ...]] = [()] * len(turns)
    while True:
        state = random_states() if draws else None
        for turn, one in zip(turns, given, strict=True):
            if state is not None and turn is not turns[0] and not same_states(state, random_states()):
                set_random_states(state)
            turn.go_on(*one)
        if turns[0].met is None:
            return
        together, _ = turns[0].met
        try:
            given = [(one,) for one in together([turn.met[1] for turn in turns])]  # type: ignore[index]
        except BaseException as error:
            turns[0].fail(error)
            raise


class ShareRanks(Collectives):
    """One share among all: a rank that has several neighbours in its own process.

    place: among the own shares.
    """

    def __init__(self, own: Shares, place: int) -> None:
        self._own, self.key = own, own.ranks.key
        self.rank, self.world_size = own.ranks.rank * own.count + place, own.world_size

    @property
    def alone(self) -> bool:
        """Whether this process finds something out by itself."""
        return self._own.ranks.alone

    @alone.setter
    def alone(self, value: bool) -> None:
        self._own.ranks.alone = value

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        def together(parts: list[Tensor]) -> list[None]:
            if op == ReduceOp.SUM:
                total = self._own.total(parts)
            else:
                combine = torch.maximum if op == ReduceOp.MAX else torch.minimum
                total = parts[0].clone()
                for part in parts[1:]:
                    total = combine(total, part)
                total = self._own.ranks.all_reduce(total, op)
            with torch.no_grad():
                for part in parts:
                    part.copy_(total)
            return [None] * len(parts)

        self._own.meet(together, tensor)
        return lambda: None

    def all_gather(self, tensor: Tensor) -> Tensor:
        def together(parts: list[Tensor]) -> list[Tensor]:
            found = self._own.ranks.all_gather(torch.stack([part.detach() for part in parts]))
            return [found.view(self.world_size, *tensor.shape)] * len(parts)

        return self._own.meet(together, tensor)  # type: ignore[no-any-return]

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        def together(parts: list[Tensor]) -> list[Tensor]:
            rank, place = divmod(source, self._own.count)
            sent = self._own.ranks.broadcast(parts[place].detach().clone(), rank)
            with torch.no_grad():
                return [part.copy_(sent) for part in parts]

        return self._own.meet(together, tensor)  # type: ignore[no-any-return]
