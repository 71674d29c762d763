"""The counters of a rank at a moment, read from its status board and /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from duoka.supervision.status_board import StatusBoard

if TYPE_CHECKING:
    from duoka.watching.record import RunRecord

TICKS = os.sysconf("SC_CLK_TCK")
LONG = 5.0  # seconds in one collective
SILENT = 3.0  # seconds without a sample of another machine's ranks
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class RankSample:
    """Counters of one rank since its start; times are seconds. A wait counts at its end, or when it becomes long.

    pid: 0: no sample was received yet. time: CLOCK_MONOTONIC of its machine. device: as planned. waited: in
    collectives. loaded: taking batches from loaders. samples: in these batches. ran: its main thread on a core.
    queued: its main thread ready to run, without a core. cpu: all its threads on cores. memory: bytes that it has in
    memory. inside: the collective in which it is; empty if in none. since: how long. received: for ranks of other
    machines, CLOCK_MONOTONIC of this machine when the sample came.
    """

    rank: int
    pid: int
    time: float = 0.0
    device: str = ""
    steps: int = 0
    waited: float = 0.0
    loaded: float = 0.0
    samples: int = 0
    ran: float = 0.0
    queued: float = 0.0
    cpu: float = 0.0
    memory: int = 0
    inside: str = ""
    since: float = 0.0
    received: float | None = None

    @property
    def is_known(self) -> bool:
        """Return whether there are counters."""
        return self.pid != 0


@dataclass(frozen=True, slots=True)
class RunSample:
    """The samples of all ranks of this machine; on machine 0 also the newest of the others. time: CLOCK_MONOTONIC."""

    time: float
    ranks: tuple[RankSample, ...]

    def of(self, rank: int) -> RankSample:
        """Return the sample of a rank."""
        return self.ranks[rank - self.ranks[0].rank]

    @property
    def steps(self) -> int:
        """Number of steps that all known ranks have finished."""
        return min((one.steps for one in self.ranks if one.is_known), default=0)


def take(record: RunRecord, board: StatusBoard) -> RunSample:
    """Return a sample of a run."""
    here = zip(record.ranks, record.pids, record.devices, strict=False)
    ranks = tuple(_rank(board, rank, pid, device, record.sees_waits) for rank, pid, device in here)
    return RunSample(time.monotonic(), (*ranks, *_of_other_machines(record, board)))


def _of_other_machines(record: RunRecord, board: StatusBoard) -> Iterator[RankSample]:
    rank = len(record.pids)
    for machine, count in enumerate(record.others, 1):
        found = board.remote_samples.read(machine)
        for place in range(count):
            values = (0,) if found is None else (*found.ranks[place], found.received)
            yield RankSample(rank, *values)
            rank += 1


def _rank(board: StatusBoard, rank: int, pid: int, device: str, sees_waits: bool) -> RankSample:
    ran, queued = _main_thread(pid)
    cpu, memory = _process(pid)
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
        cpu=cpu,
        memory=memory,
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


def _process(pid: int) -> tuple[float, int]:
    """Return the processor time of a process, and its memory in bytes; 0 if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * PAGE
    return 0.0, 0
