"""The parts of a rank's time, from two samples."""

from __future__ import annotations

from dataclasses import dataclass

from duoka.watching.sample import RankSample


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a rank's time, each as a fraction; they add up to 1.

    waiting: in collectives, for other ranks. loading: for batches of loaders. queued: ready to compute, without a
    core. computing: its main thread on a core. rest: its main thread asleep, as for a disk, another program or a GPU.
    """

    waiting: float
    loading: float
    computing: float
    queued: float
    rest: float


def parts(before: RankSample, after: RankSample) -> Parts:
    """Return the parts of the time between two samples of one rank.

    The main thread also runs while it waits (it polls at first) and loads (without loader workers). What the kernel
    counted of running is therefore at most what is left beside these two.
    """
    seconds = after.time - before.time  # by the clock of its machine
    if seconds <= 0:
        raise ValueError(f"the samples are {seconds:g} s apart, not more than 0")
    waiting = max(0.0, after.waited - before.waited)  # what a long wait took is corrected at its end
    loading = after.loaded - before.loaded
    known = max(seconds, waiting + loading)  # a wait that is counted now may have begun before
    left = known - waiting - loading
    computing = min(left, max(0.0, after.ran - before.ran))
    queued = min(left - computing, max(0.0, after.queued - before.queued))
    rest = left - computing - queued
    return Parts(*(part / known for part in (waiting, loading, computing, queued, rest)))


@dataclass(frozen=True, slots=True)
class Part:
    """A part as it is shown. field: of `Parts`. name: in full. column: in a table. style: in the terminal."""

    field: str
    name: str
    column: str
    style: str
    page_style: str


PARTS = (
    Part("computing", "computes", "computes", "green", "c1"),
    Part("waiting", "waits for other ranks", "waits", "red", "c3"),
    Part("loading", "loads", "loads", "yellow", "c2"),
    Part("queued", "queues for a core", "queues", "magenta", "c4"),
    Part("rest", "sleeps", "sleeps", "bright_black", "c0"),
)


def parts_shown(sees_waits: bool) -> list[Part]:
    """Return the parts that can be known of a run."""
    return [part for part in PARTS if part.field != "waiting" or sees_waits]
