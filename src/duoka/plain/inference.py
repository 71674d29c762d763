"""`duoka.predict` in a script: every rank computes all of it on its own device, and has all outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.inference.pool import InlinePool
from duoka.plain.session import Session


def install(session: Session) -> None:
    """Keep its batches, which look like cut ones, whole. In threads of its own nothing is cut in any case."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def next_result(self: InlinePool) -> Any:
            with session.calls.computed_whole():
                return original(self)

        return next_result

    session.patches.replace(InlinePool, "next_result", make)
