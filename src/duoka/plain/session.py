"""What the interceptions of one run have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from duoka.options import BatchNorm, Loading
from duoka.plain.caller import Caller
from duoka.plain.chance import Chance
from duoka.plain.patching import Patches
from duoka.strategies import Strategy
from duoka.view.calls import ModuleCalls
from duoka.view.collectives import Collectives
from duoka.view.view import View


class Settings(Protocol):
    """What was decided of the numbers (`duoka.plan.Plan`)."""

    @property
    def batch_norm(self) -> BatchNorm:
        """Of the whole batch, or of each share."""

    @property
    def loading(self) -> Loading:
        """How a loader is shared out."""


@dataclass(frozen=True)
class Session:
    """What one worker's interceptions need. say: shows a line once, on rank 0."""

    plan: Settings
    ranks: Collectives
    view: View
    calls: ModuleCalls
    strategy: Strategy
    patches: Patches
    caller: Caller
    chance: Chance
    say: Callable[[str], None]

    def first(self, action: Callable[[], Any]) -> Any:
        """Rank 0 does it; every rank has its result, or its exception. Where one rank is by itself, it does it."""
        if not self.patches.active or self.ranks.alone:
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
