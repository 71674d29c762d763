"""Records, samples and states made by hand."""

from __future__ import annotations

from typing import Any

from duoka.watching.record import RunRecord
from duoka.watching.sample import RankSample, RunSample


def record(ranks: int = 2, **given: Any) -> RunRecord:
    """The record of a run of this process on CPUs."""
    usual: dict[str, Any] = {
        "pid": 100,
        "name": "train.py",
        "devices": ("CPU",) * ranks,
        "first": 0,
        "begun": 0.0,
        "sees_waits": True,
        "samples_differ": False,
        "board": 3,
        "pids": tuple(range(101, 101 + ranks)),
    }
    return RunRecord(**usual | given)


def sample(time: float, *ranks: dict[str, Any]) -> RunSample:
    """A sample of ranks with these counters."""
    found = ({"pid": 101 + rank, "time": time, "device": "CPU"} | given for rank, given in enumerate(ranks))
    return RunSample(time, tuple(RankSample(rank, **given) for rank, given in enumerate(found)))
