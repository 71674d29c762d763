"""`duoka.predict` in a script: every rank computes all of it on its own device, and has all outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.inference.crew import Alone
from duoka.plain.session import Session


def install(session: Session) -> None:
    """Keep its batches, which look like cut ones, whole. In threads of its own nothing is cut in any case."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def take(self: Alone) -> Any:
            with session.calls.computed_whole():
                return original(self)

        return take

    session.patches.replace(Alone, "take", make)
