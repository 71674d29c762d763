"""One lock for each card, so that two runs never take the same: `~run/duoka/GPU-….lock`, with its holder's name.

Those who wait for cards have a place in a queue in the same way: `~run/duoka/7.waits`, locked as long as they wait.

The kernel frees a lock when the last process that holds it is gone, in whatever way: the command process and
the workers that were forked from it. Locks are for the processes of one user on one machine; what others do is
seen by what computes on a card.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duoka.devices.gpu import Holder

PATIENCE = 10.0  # seconds
UNKNOWN = Holder(0, "another program", 0.0)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process of duoka that waits for cards. number: who has a smaller one came before.

    request: in the words of `--devices`. visible: its CUDA_VISIBLE_DEVICES.
    """

    number: int
    holder: Holder
    request: str
    visible: str | None


class Held:
    """Locks that this process, and what it forks, holds until `release` or until they are gone."""

    def __init__(self, files: Iterable[int] = ()) -> None:
        self._files = list(files)

    def release(self) -> None:
        """Let go of all of them. Also when asked twice."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Locks:
    """The locks, looked at and taken by one process at a time: `with Locks() as locks: ...`.

    Whoever is inside keeps all others waiting, so that what was seen still holds when a lock is taken.
    problem: why locks cannot be kept here; then nobody holds any, and none is taken. Empty where they can.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or _folder_of_this_user()
        self.problem = ""
        self._mutex = -1

    def __enter__(self) -> Locks:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._mutex = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if os.fstat(self._mutex).st_uid != os.getuid():
                self.problem = "it belongs to another user"
            elif not _wait_for(self._mutex):
                self.problem = (
                    f"another process of duoka has been looking at the cards for {PATIENCE:g} s; is it stopped?"
                )
        except OSError as error:
            self.problem = error.strerror or str(error)
        if self.problem:
            self.problem = f"cards cannot be kept from other runs of duoka, for want of {self.folder}: {self.problem}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._mutex != -1:
            os.close(self._mutex)
            self._mutex = -1

    def holder(self, uuid: str) -> Holder | None:
        """Who holds the lock of a card; None if nobody does."""
        return None if self.problem else _as_holder(_read_locked(self._path(uuid)))

    def hold(self, uuids: Iterable[str], command: str) -> tuple[Held, dict[str, Holder]]:
        """Take the locks of these cards.

        Returns what is held now, and who holds those that are not to be had.
        """
        files: list[int] = []
        others: dict[str, Holder] = {}
        for uuid in () if self.problem else uuids:
            file = _take(self._path(uuid), asdict(Holder(os.getpid(), command, time.time())))
            if file is None:
                others[uuid] = self.holder(uuid) or UNKNOWN
            else:
                files.append(file)
        return Held(files), others

    def queue(self) -> list[Waiting]:
        """Those who wait, in the order in which they came. What others left behind who wait no more is removed."""
        found = []
        for path in [] if self.problem else self.folder.glob("*.waits"):
            told = _read_locked(path)
            if told is None:
                path.unlink(missing_ok=True)
            elif path.stem.isdecimal() and isinstance(told.get("request"), str):
                holder = _as_holder(told.get("holder")) or UNKNOWN
                found.append(Waiting(int(path.stem), holder, told["request"], told.get("visible")))
        return sorted(found, key=lambda waiting: waiting.number)

    def join(self, request: str, visible: str | None, command: str) -> tuple[int, Held]:
        """Take the last place in the queue: its number, and what keeps it."""
        number = max((waiting.number for waiting in self.queue()), default=0) + 1
        holder = asdict(Holder(os.getpid(), command, time.time()))
        file = _take(self.folder / f"{number}.waits", {"holder": holder, "request": request, "visible": visible})
        return number, Held([] if file is None else [file])

    def _path(self, uuid: str) -> Path:
        return self.folder / f"{uuid.replace('/', '-')}.lock"


def _take(path: Path, told: dict[str, Any]) -> int | None:
    """A file, locked, with this in it; None if another process has it locked."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not _lock(file):
        os.close(file)
        return None
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(told).encode(), 0)
    return file


def _read_locked(path: Path) -> dict[str, Any] | None:
    """What is in a file that a process has locked, empty if it is nothing of ours; None if none has."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _lock(file):
            return None
        with suppress(ValueError):
            told = json.loads(os.pread(file, 1 << 16, 0))
            return told if isinstance(told, dict) else {}
        return {}
    finally:
        os.close(file)


def _as_holder(told: Any) -> Holder | None:
    if told is None:
        return None
    with suppress(TypeError):
        return Holder(**told)
    return UNKNOWN


def _lock(file: int) -> bool:
    """Take a lock; whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _wait_for(mutex: int) -> bool:
    """Wait until it is one's turn, which others have for the time of one look; whether it came."""
    deadline = time.monotonic() + PATIENCE
    while not _lock(mutex):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _folder_of_this_user() -> Path:
    """Where a login session keeps what lives as long as processes do; elsewhere a folder of one's own in /tmp.

    XDG_RUNTIME_DIR is not asked: a job of cron has none, and must find the locks of the user's sessions.
    """
    uid = os.getuid()
    session = Path(f"/run/user/{uid}")
    with suppress(OSError):
        if stat.S_ISDIR(session.lstat().st_mode) and os.access(session, os.W_OK):
            return session / "duoka"
    return Path(f"/tmp/duoka-{uid}")
