"""The objects that the interceptions of one run share, for plain scripts and for the API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.grad_mode import set_multithreading_enabled

from duoka.collectives.base import Collectives
from duoka.plain.caller import Caller
from duoka.plain.patching import Patches
from duoka.plain.shared_random import SharedRandom
from duoka.planning.options import RunSettings
from duoka.private import untested
from duoka.strategies import Strategy, create
from duoka.strategies.balancing import Balance
from duoka.strategies.exact import be_deterministic
from duoka.view.generators import RankStream
from duoka.view.modules.calls import ModuleCalls
from duoka.view.view import View


@dataclass(frozen=True)
class Session:
    """The objects of one worker's interceptions. say: prints a line once, on rank 0."""

    settings: RunSettings
    ranks: Collectives
    view: View
    calls: ModuleCalls
    strategy: Strategy
    patches: Patches
    caller: Caller
    shared_random: SharedRandom
    say: Callable[[str], None]

    def first(self, action: Callable[[], Any]) -> Any:
        """Do something on rank 0 only, and return its result, or raise its exception, on every rank.

        A rank that runs without the others does it itself.
        """
        if not self.patches.active or self.ranks.isolated:
            return action()
        result, error = None, None
        with self.caller.nested():
            if self.ranks.rank == 0:
                try:
                    result = action()
                except Exception as caught:
                    error = caught
            result, failed = self.ranks.broadcast_object((result, error), 0)
        if failed is not None:
            raise error or failed
        return result

    def once(self, action: Callable[[], Any]) -> Any:
        """The same for an action whose objects the other ranks may still read or write: it waits for these."""
        with self.caller.nested():
            self.ranks.barrier()
        return self.first(action)

    @contextmanager
    def rank_local(self) -> Iterator[None]:
        """Within the context, read rows that other ranks do not read: nothing is shared with them."""
        with self.patches.rank_local_work(), self.calls.computed_whole():
            yield

    def open_first(self, opening: Callable[[], Any], told: Callable[[Any], Any] = lambda _: None) -> tuple[Any, Any]:
        """Open something on rank 0. Return it there, None on other ranks; and on all what `told` returns of it."""
        opened: list[Any] = []

        def action() -> Any:
            opened.append(opening())
            return told(opened[0])

        answer = self.first(action)
        return opened[0] if opened else None, answer


def open_session(
    settings: RunSettings,
    ranks: Collectives,
    shared_random: SharedRandom,
    device: torch.device,
    say: Callable[[str], None],
    interceptions: Iterable[Callable[[Session], None]],
    is_plain: bool = True,
) -> Session:
    """Install interceptions; `session.patches.undo()` removes them.

    device: of this rank. say: prints a line of the header (on rank 0 only). is_plain: every model is called with
    batches, and sharded by a strategy that does; otherwise the API says which.
    """
    if settings.strategy == "exact":
        be_deterministic(device)
    strategy = create(settings, ranks, every=is_plain)
    view = strategy.view(ranks, say)
    view.set_row_independent(settings.row_independent)
    if not view.shares.exact:
        view.set_weights(settings.weights)
    view.batch_norm = settings.batch_norm
    if settings.randomness == "worker":
        view.rank_stream = RankStream((shared_random.entropy + ranks.rank) % 2**63)
    for line in untested(torch.__version__):
        say(line)
    patches = Patches()
    patches.refused = view.raised
    caller = Caller(patches, ranks)
    shared_random.rank_local = caller.is_rank_local
    ranks.all_ranks.reads_alone = lambda: patches.rank_local
    calls = ModuleCalls(view, converts=is_plain)
    session = Session(settings, ranks, view, calls, strategy, patches, caller, shared_random, say)
    for interception in interceptions:
        interception(session)
    # On GPUs autograd has a thread for each device, and this thread would wait for it. In this one, hooks and modules
    # that a pass calls are the script's, whatever the device, and collectives in a graph have one order.
    in_one_thread = set_multithreading_enabled(False)
    patches.at_end(lambda: in_one_thread.__exit__(None, None, None))
    if settings.measures_rows and ranks.world_size > 1 and not view.shares.exact:
        patches.at_end(Balance(view, ranks, device, say).handle.remove)
    return session
