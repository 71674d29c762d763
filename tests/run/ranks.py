"""Work on the ranks of a run, as workers forked from the test."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import duoka


def on_ranks(world_size: int, work: Callable[[duoka.Run], Any], **how: Any) -> list[Any]:
    """Return the result of `work(run)` on each rank. how: for `duoka.start`."""
    how = {"seed": 0} | how

    def begin() -> Any:
        with duoka.start(**how) as run:
            return work(run)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: pytest's own are no matter
        return duoka.launch(begin, devices=f"cpu:{world_size}", timeout=20)
