"""`duoka.predict` in a script: every rank computes all outputs on its own device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from duoka.inference.replicas import InlinePool
from duoka.plain.session import Session


def install(session: Session) -> None:
    """Do not shard the batches of `duoka.predict`. In its own threads nothing is sharded in any case."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def next_result(self: InlinePool) -> Any:
            with session.calls.computed_whole():
                return original(self)

        return next_result

    session.patches.replace(InlinePool, "next_result", make)
