"""Work on the ranks of a run, as workers forked from the test."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import duoka


def on_ranks(world_size: int, work: Callable[[duoka.Run], Any], **how: Any) -> list[Any]:
    """Return the result of `work(run)` on each rank. how: for `duoka.start`."""

    def begin() -> Any:
        with duoka.start(**{"seed": 0} | how) as run:
            return work(run)

    return _launch(begin, world_size)


def each_on_ranks(
    world_size: int, works: Mapping[str, Callable[[duoka.Run], Any]], **how: Any
) -> dict[str, list[Any]]:
    """Return the results of several works, each in a run of its own, by workers that are started once.

    If a work raises an exception, that is its result. how: for `duoka.start`.
    """

    def one(work: Callable[[duoka.Run], Any]) -> Any:
        try:
            with duoka.start(seed=0, **how) as run:
                return work(run)
        except Exception as error:
            return error

    ranks = _launch(lambda: {name: one(work) for name, work in works.items()}, world_size)
    return {name: [found[name] for found in ranks] for name in works}


def _launch(function: Callable[[], Any], world_size: int) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: pytest's own are no matter
        return duoka.launch(function, devices=f"cpu:{world_size}", timeout=20)
