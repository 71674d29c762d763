"""One lock for each card, so that two runs never take the same: `~run/duoka/GPU-….lock`, with its holder's name.

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
from dataclasses import asdict
from pathlib import Path

from duoka.devices.gpu import Holder

PATIENCE = 10.0  # seconds


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
        if self.problem:
            return None
        try:
            file = os.open(self._path(uuid), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return None if _lock(file) else _read(file)
        finally:
            os.close(file)

    def hold(self, uuids: Iterable[str], command: str) -> tuple[Held, dict[str, Holder]]:
        """Take the locks of these cards.

        Returns what is held now, and who holds those that are not to be had.
        """
        if self.problem:
            return Held(), {}
        mine = json.dumps(asdict(Holder(os.getpid(), command, time.time()))).encode()
        files: list[int] = []
        others: dict[str, Holder] = {}
        for uuid in uuids:
            file = os.open(self._path(uuid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            if _lock(file):
                os.ftruncate(file, 0)
                os.pwrite(file, mine, 0)
                files.append(file)
            else:
                others[uuid] = _read(file)
                os.close(file)
        return Held(files), others

    def _path(self, uuid: str) -> Path:
        return self.folder / f"{uuid}.lock"


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


def _read(file: int) -> Holder:
    with suppress(ValueError, TypeError):
        return Holder(**json.loads(os.pread(file, 1 << 16, 0)))
    return Holder(0, "another program", 0.0)


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
