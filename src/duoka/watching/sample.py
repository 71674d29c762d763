"""The counters of a rank at a moment, from its status board and the kernel; the parts of its time between two.

Samples of other machines' ranks come as messages to the command of machine 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from duoka.supervision.status_board import StatusBoard
from duoka.system.messages import printable
from duoka.system.processes import process_stat

LONG = 5.0  # seconds in one collective
SILENT = 3.0  # seconds without a sample of another machine's ranks


@dataclass(frozen=True, slots=True)
class RankSample:
    """Counters of one rank since its start; times are seconds. A wait counts at its end, or when it becomes long."""

    rank: int
    pid: int  # 0: no sample was received yet
    time: float = 0.0  # CLOCK_MONOTONIC of its machine
    device: str = ""  # as planned
    steps: int = 0
    waited: float = 0.0  # in collectives
    loaded: float = 0.0  # taking batches from loaders
    samples: int = 0  # in these batches
    rows: int = 0  # this and the next as in `Counters`
    seconds_of_row: float = 0.0
    ran: float = 0.0  # its main thread on a core
    queued: float = 0.0  # its main thread ready to run, without a core
    cpu: float = 0.0  # all its threads on cores
    memory: int = 0  # bytes that it has in memory
    inside: str = ""  # the collective in which it is; empty if in none
    since: float = 0.0  # how long
    received: float | None = None  # of ranks of other machines: CLOCK_MONOTONIC of this machine when the sample came

    @property
    def is_known(self) -> bool:
        return self.pid != 0


@dataclass(frozen=True, slots=True)
class RunSample:
    """The samples of all ranks of this machine; on machine 0 also the newest of the others. time: CLOCK_MONOTONIC."""

    time: float
    ranks: tuple[RankSample, ...]

    def of_rank(self, rank: int) -> RankSample:
        return self.ranks[rank - self.ranks[0].rank]

    @property
    def steps(self) -> int:
        """Number of steps that all known ranks have finished."""
        return min((rank.steps for rank in self.ranks if rank.is_known), default=0)


def sample_rank(board: StatusBoard, rank: int, pid: int, device: str, sees_waits: bool) -> RankSample:
    """Return the sample of a rank of this machine. device: as planned."""
    ran, queued = _main_thread(pid)
    stat = process_stat(pid)
    counters, progress = board.counters(rank), board.read(rank)
    since = max(0.0, time.monotonic() - progress.since) if progress.waiting else 0.0
    if sees_waits and since > LONG:  # the worker counts a wait at its end, which may never come
        counters = counters._replace(waited=counters.waited + since)
    return RankSample(
        rank,
        pid,
        time.monotonic(),
        device,
        *counters,
        ran=ran,
        queued=queued,
        cpu=0.0 if stat is None else stat.cpu,
        memory=0 if stat is None else stat.memory,
        inside=progress.text if progress.waiting else "",
        since=since,
    )


def _main_thread(pid: int) -> tuple[float, float]:
    """Return the seconds that a process's main thread has run and has waited for a core; zeros if it has ended."""
    with suppress(OSError, ValueError):
        with open(f"/proc/{pid}/task/{pid}/schedstat") as file:
            ran, queued, _ = map(int, file.read().split())
        return ran / 1e9, queued / 1e9
    return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a rank's time, each as a fraction; they add up to 1."""

    waiting: float  # in collectives, for other ranks
    loading: float  # for batches of loaders
    computing: float  # its main thread on a core
    queued: float  # ready to compute, without a core
    rest: float  # its main thread asleep, as for a disk, another program or a GPU


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


_SENT = fields(RankSample)[1:-1]  # without the rank, which follows from the order, and the time of receipt
_KINDS = tuple({"int": int, "float": float, "str": str}[str(field.type)] for field in _SENT)
LONGEST = 256  # characters of a text
HIGHEST = 1 << 62  # of a number


def as_message(ranks: Sequence[RankSample]) -> list[list[Any]]:
    """Return the samples of all ranks of a machine as plain data."""
    return [[getattr(rank, field.name) for field in _SENT] for rank in ranks]


def checked(message: Any, count: int) -> list[list[Any]]:
    """Check a received message. count: of the machine's ranks. Raises ValueError if it is not one of `as_message`."""
    if not isinstance(message, list) or len(message) != count:
        raise ValueError(f"not the samples of {count} ranks")
    for values in message:
        if not isinstance(values, list) or len(values) != len(_KINDS):
            raise ValueError("not the sample of a rank")
    return [[_checked(value, kind) for value, kind in zip(values, _KINDS, strict=True)] for values in message]


def _checked(value: Any, kind: type) -> Any:
    if kind is str and isinstance(value, str):
        return printable(value[:LONGEST])[:LONGEST]
    if kind is not str and type(value) in (int, kind) and 0 <= value < HIGHEST:  # false for NaN
        return kind(value)
    raise ValueError("not the sample of a rank")
