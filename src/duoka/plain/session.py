"""The objects that the interceptions of one run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from duoka.options import BatchNorm, Loading
from duoka.plain.caller import Caller
from duoka.plain.patching import Patches
from duoka.plain.shared_random import SharedRandom
from duoka.strategies import Strategy
from duoka.view.collectives.base import Collectives
from duoka.view.modules.calls import ModuleCalls
from duoka.view.view import View


class SessionSettings(Protocol):
    """The settings that change numbers (`duoka.plan.Plan`)."""

    @property
    def batch_norm(self) -> BatchNorm:
        """Statistics of the whole batch, or of each share."""

    @property
    def loading(self) -> Loading:
        """The sharding of loaders."""


@dataclass(frozen=True)
class Session:
    """The objects of one worker's interceptions. say: prints a line once, on rank 0."""

    plan: SessionSettings
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
        if not self.patches.active or self.ranks.rank_local:
            return action()
        result, error = None, None
        if self.ranks.rank == 0:
            try:
                result = action()
            except Exception as caught:
                error = caught
        result, failed = self.ranks.broadcast_object((result, error), 0)
        if failed is not None:
            raise error or failed
        return result
