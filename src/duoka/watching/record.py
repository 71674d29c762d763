"""The record by which other processes of this user find a run: a locked file `~run/duoka/….run`.

It names the command process and the file descriptor of its status board, which others open below /proc and only
read. So watching a run costs it nothing. The kernel releases the lock when the run's processes end: a file without a
lock is left over, and the next reader removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from duoka.supervision.status_board import StatusBoard
from duoka.system.processes import runtime_folder
from duoka.watching.sample import RankSample, RunSample, sample_rank

if TYPE_CHECKING:
    from duoka.planning.plan import Plan

BOARD = "duoka-board"  # name of the unnamed file
LONGEST = 20_000  # characters of a report
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_REPORTS = 8  # the last ones, so that the file stays small however often the run is restarted


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of the file.

    For a run on several machines, machine 0's status board also has the samples of the others.
    """

    pid: int  # of the command process
    name: str  # of the script or function
    devices: tuple[str, ...]  # of the workers, in the order of ranks
    first: int  # rank of the first worker
    begun: float  # UNIX time
    sees_waits: bool  # collectives are waited for where they are called, so that the board has the time
    samples_differ: bool  # each rank loads a batch of its own
    attempt: int = 0  # 0 at first, and one more after each restart
    faults: tuple[str, ...] = ()  # what ended the attempts so far
    reports: tuple[str, ...] = ()  # what was printed about each of them
    pids: tuple[int, ...] = ()  # of the workers
    board: int = -1  # descriptor of the status board in the command process; -1: there is none
    code: int | None = None  # the exit code; None: the run goes on
    machine: int = 0  # the number of this one
    machines: tuple[str, ...] = ()  # each as named in messages; empty if an engine started all on one machine
    workers: tuple[int, ...] = ()  # of each machine
    run: str = ""  # a name of the run, equal on all machines

    @property
    def others(self) -> tuple[int, ...]:
        """Numbers of workers of the machines whose samples the status board has."""
        return self.workers[1:] if self.machine == 0 else ()

    def machine_of(self, rank: int) -> str:
        """Return the machine of a rank as named in messages; empty if there is only one."""
        ends = accumulate(self.workers)
        return next((machine for machine, end in zip(self.machines, ends, strict=False) if rank < end), "")

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + len(self.pids))

    @property
    def is_alive(self) -> bool:
        """True from the start of all workers to the end of the first one, which then has no counters."""
        # A process that has ended and was not waited for is still in /proc, without a program.
        return bool(self.pids) and all(os.path.exists(f"/proc/{pid}/exe") for pid in self.pids)


def record_of(plan: Plan, run: str = "") -> RunRecord:
    """Return the record of a run of this process that begins now. run: its name, equal on all machines."""
    from duoka.planning.plan import Kind  # `duoka gpus`, which only reads records, imports no more than it needs

    is_distributed, machines = plan.kind is Kind.DISTRIBUTED, plan.machines
    names = tuple(map(machines.where, range(machines.count)))
    return RunRecord(
        pid=os.getpid(),
        name=plan.target.name,
        devices=tuple(map(str, plan.devices)),
        first=plan.ranks.start,
        begun=time.time(),
        sees_waits=plan.devices[0].type == "cpu" and not is_distributed and plan.world_size > 1,
        samples_differ=is_distributed,
        machine=machines.number,
        machines=names if len(set(names)) > 1 else (),
        workers=machines.workers,
        run=run,
    )


class PublishedRun:
    """The record of a run of this process, until `close`. If the file cannot be written, the run is not shown.

    run: its name, equal on all machines. is_shown: False for trials, which have no file.
    """

    def __init__(self, plan: Plan, folder: Path | None = None, run: str = "", is_shown: bool = True) -> None:
        self.record = record_of(plan, run)
        self._board = -1
        self._status: StatusBoard | None = None
        self._path = (folder or runtime_folder()) / f"{os.getpid()}-{secrets.token_hex(4)}.run"
        self._file = -1
        if is_shown:
            with suppress(OSError):
                self._file = _create_locked(self._path)
        self._publish()

    def begin(self, attempt: int, ranks: range) -> StatusBoard:
        """Return the status board of an attempt."""
        self._close_board()
        self._board = os.memfd_create(BOARD)  # a new one: counters of the attempt before may still be read
        self.record = replace(self.record, attempt=attempt, first=ranks.start, board=self._board, pids=())
        self._status = StatusBoard.create(len(ranks), ranks.start, self._board, self.record.others)
        return self._status

    def started(self, pids: Sequence[int]) -> None:
        """Publish that the workers of the attempt have these pids."""
        self.record = replace(self.record, pids=tuple(pids))
        self._publish()

    def sample(self) -> RunSample | None:
        """Return a sample of the attempt; None before its workers have started, and when one of them has ended."""
        return take(self.record, self._status) if self._status is not None and self.record.is_alive else None

    def look(self) -> None:
        """Take a sample, for a report of the run."""

    def failed(self, cause: str, report: str = "") -> None:
        """Publish the fault that ended the attempt. report: what was printed about it, with tracebacks or stacks."""
        reports = [*self.record.reports, report[-LONGEST:]]
        reports[:-MOST_REPORTS] = [""] * len(reports[:-MOST_REPORTS])
        self.record = replace(self.record, faults=(*self.record.faults, cause), reports=tuple(reports))
        self._publish()

    def ended(self, code: int) -> None:
        """Publish the exit code of the run."""
        self.record = replace(self.record, code=code)
        self._publish()

    def close(self) -> None:
        """Remove the record."""
        if os.getpid() != self.record.pid:  # in a process that the script forked
            return
        self._close_board()
        if self._file != -1:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _close_board(self) -> None:
        if self._board != -1:
            os.close(self._board)
            self._board = -1

    def _publish(self) -> None:
        if self._file == -1:
            return
        line = json.dumps(asdict(self.record)).encode() + b"\n"
        with suppress(OSError):  # a full disk
            os.pwrite(self._file, line, 0)  # in place, as a new file would have no lock
            os.ftruncate(self._file, len(line))


def published_runs(folder: Path | None = None) -> Iterator[RunRecord]:
    """Yield the runs of this user on this machine, and remove the files of those that have ended."""
    for path in sorted((folder or runtime_folder()).glob("*.run")):
        with suppress(OSError):
            file = os.open(path, _READ)
            try:
                if os.fstat(file).st_uid == os.getuid():
                    with suppress(BlockingIOError):  # the run goes on, and has it locked
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        path.unlink()
                        continue
                    if (record := _read(file)) is not None:
                        yield record
            finally:
                os.close(file)


class FollowedRun:
    """A run of another process, of which the record stays readable when the run has ended and removed its file."""

    def __init__(self, record: RunRecord, folder: Path | None = None) -> None:
        self.record = record
        self._file = -1
        for path in (folder or runtime_folder()).glob(f"{record.pid}-*.run"):
            with suppress(OSError):
                file = os.open(path, _READ)
                if (there := _read(file)) is not None and there.begun == record.begun:
                    self._file = file
                    return
                os.close(file)

    def read(self) -> RunRecord:
        """Return the record as it is now, or was at the end of the run."""
        with suppress(OSError):
            self.record = _read(self._file) or self.record
        return self.record

    def close(self) -> None:
        if self._file != -1:
            os.close(self._file)
            self._file = -1


def open_board(record: RunRecord) -> StatusBoard | None:
    """Map the status board of a run; None if it has none, or has just ended."""
    with suppress(OSError, ValueError):
        path = f"/proc/{record.pid}/fd/{record.board}"
        if BOARD not in os.readlink(path):  # closed, as by a script that closes all files
            return None
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return StatusBoard.open(file, record.ranks, record.others)
        finally:
            os.close(file)
    return None


def take(record: RunRecord, board: StatusBoard) -> RunSample:
    """Return a sample of a run."""
    here = zip(record.ranks, record.pids, record.devices, strict=False)
    ranks = [sample_rank(board, rank, pid, device, record.sees_waits) for rank, pid, device in here]
    for machine, count in enumerate(record.others, 1):
        received = board.remote_samples.read(machine)
        for at in range(count):
            values = (0,) if received is None else (*received.ranks[at], received.received)
            ranks.append(RankSample(len(ranks), *values))
    return RunSample(time.monotonic(), tuple(ranks))


def _create_locked(path: Path) -> int:
    """Create a file that gets its name only when it is locked; return its descriptor."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.lstat(path.parent).st_uid != os.getuid():
        raise PermissionError(f"{path.parent} belongs to another user")
    hidden = path.with_suffix(".new")  # a reader would remove a file that is not locked yet
    file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(hidden, path)
    return file


def _read(file: int) -> RunRecord | None:
    """Read a file; None if it is being written, or was written by another version."""
    with suppress(ValueError, TypeError):
        # The rest of a longer line may follow the end of a new one.
        values = json.loads(os.pread(file, 1 << 20, 0).partition(b"\n")[0])
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return RunRecord(**{**values, **lists})
    return None
