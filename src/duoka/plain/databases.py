"""sqlite databases: rank 0 has the file, and each other rank a replica, in which it makes the same changes.

All connections of a rank to one database, from any thread and through any driver based on `sqlite3`, use one replica,
so each sees the others' changes, as on rank 0. If the file was replaced, the replica is, too.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.util import get_temp_dir
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from duoka.errors import Refused
from duoka.plain.session import Session
from duoka.system.user_code import user_line

_URI = 7  # position of the parameter uri of `connect`
_WAIT = 0.1  # seconds between two attempts at a locked database
_LOOKS = 100
_LOCKED = (5, 6)  # SQLITE_BUSY and SQLITE_LOCKED


def install(session: Session) -> None:
    """Intercept `sqlite3.connect`, and `sqlite3.dbapi2.connect`, which SQLAlchemy calls."""
    caller, ranks = session.caller, session.ranks
    replicas = Replicas(sqlite3.connect)

    @session.patches.around(sqlite3, "connect")
    @session.patches.around(sqlite3.dbapi2, "connect")
    def connect(original: Callable[..., Any], database: Any, *args: Any, **kwargs: Any) -> Any:
        is_uri = bool(kwargs.get("uri", args[_URI - 1] if len(args) >= _URI else False))
        path, query = _file(os.fsdecode(database), is_uri)
        if path is None or caller.is_rank_local() or not session.patches.active or caller.is_temporary(path):
            return original(database, *args, **kwargs)
        synchronizes = caller.is_joint()  # other threads open connections in any order
        with caller.nested() if synchronizes else nullcontext():
            if synchronizes:
                ranks.barrier()  # rank 0 has written its changes so far, and waits with the next
            if ranks.rank:
                path = replicas.of(path)
            if synchronizes:
                ranks.barrier()
            if ranks.rank:
                database = f"file:{quote(path)}?{query}" if is_uri else path
            return original(database, *args, **kwargs)


def _file(database: str, is_uri: bool) -> tuple[str | None, str]:
    """Return the path of a database, None for one in memory, and the query part of its URI."""
    query = ""
    if is_uri and database.startswith("file:"):
        parts = urlsplit(database)
        database, query = unquote(parts.path), parts.query
        if "memory" in parse_qs(query).get("mode", []):
            return None, query
    return (None if database in ("", ":memory:") else os.path.abspath(database)), query


class Replicas:
    """This rank's copies of databases, in a folder that is removed with the run."""

    def __init__(self, connect: Callable[..., Any]) -> None:
        self._connect = connect
        self._known: dict[str, tuple[tuple[int, int] | None, str]] = {}
        self._lock = threading.Lock()

    def of(self, path: str) -> str:
        """Return the replica of the database at `path`.

        If there can be none, return `path`, so that opening it raises the error.

        Raises:
            Refused: the database stays locked.
        """
        with self._lock:
            now = _identity(path)
            before, replica = self._known.get(path, (None, ""))
            if not replica or (now != before and before is not None):
                if not os.path.isdir(os.path.dirname(path)):
                    return path
                replica = os.path.join(tempfile.mkdtemp(dir=get_temp_dir()), os.path.basename(path))
                if now is not None:
                    self._copy(path, replica)
            self._known[path] = now, replica
            return replica

    def _copy(self, path: str, replica: str) -> None:
        looks = 0

        def look(status: int, remaining: int, total: int) -> None:
            nonlocal looks
            looks += status in _LOCKED
            if looks > _LOOKS:
                raise Refused(
                    f"{user_line()} opens the database {path} while a transaction holds it exclusively, so the other "
                    "ranks cannot have it as it is; open it before, or after"
                )

        source, copy = self._connect(path), self._connect(replica)
        try:
            source.backup(copy, progress=look, sleep=_WAIT)
        except sqlite3.DatabaseError:  # not a database: reading it raises the error
            shutil.copyfile(path, replica)
        finally:
            source.close()
            copy.close()


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
