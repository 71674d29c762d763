"""Files: what changes the world happens once, on rank 0, and every rank has the outcome.

A file that the script opens for writing is written by rank 0 alone; reading it back waits until all ranks are
there. Questions (`exists`, `listdir`, …) are answered by rank 0. Such calls of libraries and of other threads are
left alone, and so is what libraries write into caches and temporary folders.
"""

from __future__ import annotations

import builtins
import glob
import io
import os
import shutil
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from duoka.plain.session import Session
from duoka.view.site import is_standard, is_users

# (where, names): done by rank 0, the others wait and get the same outcome.
ACTIONS: tuple[tuple[Any, str], ...] = (
    (os, "mkdir makedirs remove unlink rename replace rmdir removedirs symlink link truncate"),
    (shutil, "copy copy2 copyfile copytree rmtree move unpack_archive make_archive"),
    (tarfile.TarFile, "extract extractall"),
    (zipfile.ZipFile, "extract extractall"),
    (np, "savetxt"),  # numpy keeps an `open` of its own
    (Path, "mkdir unlink rename replace rmdir touch symlink_to"),
)
# (where, names): answered by rank 0.
QUESTIONS: tuple[tuple[Any, str], ...] = (
    (os.path, "exists isfile isdir getsize getmtime"),
    (os, "listdir"),
    (glob, "glob"),
    (Path, "exists is_file is_dir"),
    (tempfile, "mkdtemp"),
    (builtins, "input"),
)


def install(session: Session) -> None:
    """Intercept `open` for writing, and the actions and questions listed above."""
    caller = _Caller(session)

    def make_action(original: Callable[..., Any]) -> Callable[..., Any]:
        return make_once(original, changes=True)

    def make_once(original: Callable[..., Any], changes: bool = False) -> Callable[..., Any]:
        def once(*args: Any, **kwargs: Any) -> Any:
            if not caller.is_script():
                result = original(*args, **kwargs)
                if original.__name__ == "mkdtemp":
                    caller.private.append(result)
                return result
            with caller.busy():
                if changes:  # what other ranks are still reading must not go away
                    session.ranks.barrier()
                return session.first(lambda: original(*args, **kwargs))

        return once

    for make, table in ((make_action, ACTIONS), (make_once, QUESTIONS)):
        for space, names in table:
            for name in names.split():
                session.patches.replace(space, name, make)
    make_open = _opener(session, caller)
    session.patches.replace(builtins, "open", make_open)
    session.patches.replace(io, "open", make_open)


class _Caller:
    """Tells the script's own calls from those of libraries, threads and duoka itself."""

    def __init__(self, session: Session) -> None:
        self._patches = session.patches
        self._thread = threading.get_ident()
        self._busy = False
        inductor = os.path.join(tempfile.gettempdir(), "torchinductor")
        self.private = ["/dev/", str(Path.home() / ".cache"), inductor]  # what is each process's own, of libraries

    def is_private(self, path: str) -> bool:
        """Whether a file is written by a library where it keeps what is this process's own."""
        return path.startswith(tuple(self.private)) and (path.startswith("/dev/") or is_librarys(sys._getframe(2)))

    def is_free(self) -> bool:
        """Whether this is the main thread of the rank, and not inside of such a call already."""
        return self._patches.active and not self._busy and threading.get_ident() == self._thread

    def is_script(self) -> bool:
        """Whether the script itself calls, be it through the standard library (`TemporaryDirectory`)."""
        return self.is_free() and not is_librarys(sys._getframe(2))

    def busy(self) -> _Busy:
        """While this lasts, nested calls are left alone."""
        return _Busy(self)


def is_librarys(frame: FrameType | None) -> bool:
    """Whether a library's code calls, looking past the standard library."""
    while frame is not None and is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is None or not is_users(frame.f_code.co_filename)


class _Busy:
    def __init__(self, caller: _Caller) -> None:
        self._caller = caller

    def __enter__(self) -> None:
        self._caller._busy = True

    def __exit__(self, *error: object) -> None:
        self._caller._busy = False


def _opener(session: Session, caller: _Caller) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    written: set[str] = set()
    read: set[str] = set()  # since they were written
    rank = session.ranks.rank

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def written_by_another(path: str, mode: str, *args: Any, **kwargs: Any) -> Any:
            """What a rank that does not write is given: nothing, or where it may read, a copy of its own."""
            if "+" not in mode:
                return original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
            descriptor, name = tempfile.mkstemp()
            os.unlink(name)
            copy = original(descriptor, "w+b" if "b" in mode else "w+", *args, **kwargs)
            if set(mode) & set("ra"):
                with original(path, "rb" if "b" in mode else "r", *args, **kwargs) as file:
                    copy.write(file.read())
                copy.seek(0, os.SEEK_END if "a" in mode else os.SEEK_SET)
            return copy

        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
            if not isinstance(file, (str, os.PathLike)) or not session.patches.active:
                return original(file, mode, *args, **kwargs)
            path = os.path.abspath(os.fsdecode(file))
            if path in written and caller.is_free():  # rank 0 has closed it when it comes here
                written.discard(path)
                read.add(path)
                session.ranks.barrier()
            if not set(mode) & set("wax+") or caller.is_private(path):
                return original(file, mode, *args, **kwargs)
            if path in read and caller.is_free():  # all have come here, and so have read it
                read.discard(path)
                session.ranks.barrier()
            written.add(path)
            try:
                if rank:
                    return written_by_another(path, mode, *args, **kwargs)
                return original(file, mode, *args, **kwargs)
            finally:
                if "r+" in mode.replace("b", "").replace("t", "") and caller.is_free():
                    session.ranks.barrier()  # nobody writes before all have their copies

        return open

    return make
