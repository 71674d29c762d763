"""File locks on GPUs, so that two runs never take the same: `~run/duoka/GPU-….lock`, with the name of the holder.

Runs that wait for GPUs form a queue: each holds a lock on a file `~run/duoka/7.waits`.

The kernel releases a lock when the last process that holds it ends: the command process and the workers forked from
it. Locks are for the processes of one user on one machine; other users are detected by their processes on a GPU.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duoka.hardware.gpu import Holder
from duoka.system.processes import runtime_folder

MUTEX_LIMIT = 10.0  # seconds
HeldLocks = ExitStack  # locks of this process and those it forks, until `close` or until all have ended
UNKNOWN = Holder(0, "another program", 0.0)


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A duoka process in the queue for GPUs; those with smaller numbers are served first."""

    number: int
    holder: Holder
    request: str  # its `--devices`
    visible: str | None  # its variable that hides GPUs


class Locks:
    """The locks of this user: `with Locks() as locks: ...`.

    A mutex excludes other processes inside, so that what was read still holds when a lock is taken. problem: reason
    why locks cannot be used here; then no GPU has a holder, and no lock is taken. Empty if they can.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or runtime_folder()
        self.problem = ""
        self._mutex = -1

    def __enter__(self) -> Locks:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The folder may be in /tmp, where others can put a link or a folder of that name.
            self._mutex = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if os.fstat(self._mutex).st_uid != os.getuid():
                self.problem = "it belongs to another user"
            elif not _wait_for(self._mutex):
                self.problem = f"another duoka process has held the mutex for {MUTEX_LIMIT:g} s; is it stopped?"
        except OSError as error:
            self.problem = error.strerror or str(error)
        if self.problem:
            self.problem = f"GPUs cannot be locked in {self.folder}: {self.problem}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._mutex != -1:
            os.close(self._mutex)
            self._mutex = -1

    def holder(self, uuid: str) -> Holder | None:
        """Return the holder of a GPU's lock, or None."""
        return None if self.problem else _as_holder(_read_locked(self._path(uuid)))

    def hold(self, uuids: Iterable[str], command: str) -> tuple[HeldLocks, dict[str, Holder]]:
        """Lock these GPUs.

        Returns the locks taken, and for GPUs that other processes have locked their holders, by UUID.
        """
        held = HeldLocks()
        others: dict[str, Holder] = {}
        for uuid in () if self.problem else uuids:
            file = _create_locked(self._path(uuid), asdict(Holder(os.getpid(), command, time.time())))
            if file is None:
                others[uuid] = self.holder(uuid) or UNKNOWN
            else:
                held.callback(os.close, file)
        return held, others

    def queue(self) -> list[QueueEntry]:
        """Return the queue in order, and remove the files of processes that no longer wait."""
        entries = []
        for path in [] if self.problem else self.folder.glob("*.waits"):
            content = _read_locked(path)
            if content is None:  # within the mutex nobody is about to lock it
                path.unlink(missing_ok=True)
            elif path.stem.isdecimal() and isinstance(content.get("request"), str):
                holder = _as_holder(content.get("holder")) or UNKNOWN
                entries.append(QueueEntry(int(path.stem), holder, content["request"], content.get("visible")))
        return sorted(entries, key=lambda waiting: waiting.number)

    def join(self, request: str, visible: str | None, command: str) -> tuple[int, HeldLocks]:
        """Append this process to the queue; returns its number, and the lock that keeps its place."""
        number = max((waiting.number for waiting in self.queue()), default=0) + 1
        holder = asdict(Holder(os.getpid(), command, time.time()))
        file = _create_locked(
            self.folder / f"{number}.waits", {"holder": holder, "request": request, "visible": visible}
        )
        held = HeldLocks()
        if file is not None:
            held.callback(os.close, file)
        return number, held

    def _path(self, uuid: str) -> Path:
        return self.folder / f"{uuid.replace('/', '-')}.lock"


def _create_locked(path: Path, content: dict[str, Any]) -> int | None:
    """Create and lock a file with this content; None if another process has locked it."""
    # Forked workers keep the lock; programs that they start do not (O_CLOEXEC).
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not _lock(file):
        os.close(file)
        return None
    os.ftruncate(file, 0)  # files of GPUs are never removed: it may hold its last holder
    os.pwrite(file, json.dumps(content).encode(), 0)
    return file


def _read_locked(path: Path) -> dict[str, Any] | None:
    """Read a file that a process has locked: its content, {} if not ours, None if not locked."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _lock(file):  # nobody else had: closing the file releases it again
            return None
        with suppress(ValueError):
            content = json.loads(os.pread(file, 1 << 16, 0))
            return content if isinstance(content, dict) else {}
        return {}
    finally:
        os.close(file)


def _as_holder(content: Any) -> Holder | None:
    if content is None:
        return None
    with suppress(TypeError):
        return Holder(**content)
    return UNKNOWN


def _lock(file: int) -> bool:
    """Try to lock a file; returns True on success."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _wait_for(mutex: int) -> bool:
    """Wait for the mutex; returns False after `MUTEX_LIMIT` seconds."""
    deadline = time.monotonic() + MUTEX_LIMIT
    while not _lock(mutex):  # flock itself has no time limit
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
