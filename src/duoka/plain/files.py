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
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np

from duoka.plain.caller import Caller
from duoka.plain.nowhere import nowhere, of_files_only
from duoka.plain.session import Session

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
    (os.path, "exists isfile isdir islink lexists getsize getmtime getatime getctime"),
    (os, "listdir access cpu_count sched_getaffinity"),  # of which scripts make loader workers, each with a stream
    (shutil, "which disk_usage"),
    (glob, "glob"),
    (Path, "exists is_file is_dir is_symlink stat"),
    (tempfile, "mkdtemp"),
    (builtins, "input"),
)


def install(session: Session) -> None:
    """Intercept `open` for writing, and the actions and questions listed above."""
    caller = session.caller

    def make_action(original: Callable[..., Any]) -> Callable[..., Any]:
        return make_once(original, changes=True)

    def make_once(original: Callable[..., Any], changes: bool = False) -> Callable[..., Any]:
        def once(*args: Any, **kwargs: Any) -> Any:
            if not caller.is_script() or _is_temporary(args, caller):
                result = original(*args, **kwargs)
                if original.__name__ == "mkdtemp":
                    caller.temporary.append(os.path.join(result, ""))
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
    for name in ("fsync", "fdatasync", "ftruncate"):
        session.patches.replace(os, name, of_files_only)


def _is_temporary(args: tuple[Any, ...], caller: Caller) -> bool:
    """Whether it is about a file in a folder of this rank's own."""
    return bool(args) and isinstance(args[0], (str, os.PathLike)) and caller.is_temporary(os.path.abspath(args[0]))


def _still_open(files: Iterable[ref[Any]]) -> list[ref[Any]]:
    found = ((file, file()) for file in files)
    return [file for file, there in found if there is not None and not there.closed]


def _opener(session: Session, caller: Caller) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    written = caller.written
    read: set[str] = set()  # since they were written
    writers: dict[str, list[ref[Any]]] = {}  # the files as they were opened for writing
    rank = session.ranks.rank

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def written_by_another(file: Any, mode: str, size: int, *args: Any, **kwargs: Any) -> Any:
            """What a rank that does not write is given: nothing, or where it may read, a copy of its own."""
            if "+" not in mode:
                return nowhere(file, mode, *args, size=size, **kwargs)
            with tempfile.TemporaryFile() as unnamed:
                descriptor = os.dup(unnamed.fileno())
            copy = original(descriptor, "w+b" if "b" in mode else "w+", *args, **kwargs)
            if set(mode) & set("ra"):
                with original(file, "rb" if "b" in mode else "r", *args, **kwargs) as read_from:
                    copy.write(read_from.read())
                copy.seek(0, os.SEEK_END if "a" in mode else os.SEEK_SET)
            return copy

        def read_together(file: Any, path: str, mode: str, *args: Any, **kwargs: Any) -> Any:
            """The file as it is now; a copy where rank 0 still writes it."""
            try:
                if _still_open(writers.get(path, ())):
                    with caller.busy():
                        return written_by_another(file, mode + "+", 0, *args, **kwargs)
                return original(file, mode, *args, **kwargs)
            finally:
                session.ranks.barrier()

        def opened(file: Any, path: str, mode: str, *args: Any, **kwargs: Any) -> Any:
            """The file, or what rank 0 was told when it opened it."""
            error: Exception | None = None
            made = None
            try:
                made = original(file, mode, *args, **kwargs) if rank == 0 else None
            except OSError as caught:
                error = caught
            size = made.tell() if made is not None and made.seekable() else 0
            failed, size = session.ranks.broadcast_object((error, size), 0)
            if failed is not None:
                raise error or failed
            if rank:
                made = written_by_another(file, mode, size, *args, **kwargs)
            if "r+" in mode.replace("b", "").replace("t", ""):
                session.ranks.barrier()  # nobody writes before all have their copies
            return made

        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
            if not isinstance(file, (str, bytes, os.PathLike)) or not session.patches.active or caller.is_inside():
                return original(file, mode, *args, **kwargs)
            path = os.path.abspath(os.fsdecode(file))
            if path in written and caller.is_free():  # rank 0 has written what it writes before it comes here
                read.add(path)
                session.ranks.barrier()
                if not set(mode) & set("wax+"):
                    return read_together(file, path, mode, *args, **kwargs)
            if not set(mode) & set("wax+") or caller.is_private(path) or kwargs.get("opener"):
                return original(file, mode, *args, **kwargs)
            if path in read and caller.is_free():  # all have come here, and so have read it
                read.discard(path)
                session.ranks.barrier()
            written.add(path)
            if caller.is_script():
                with caller.busy():
                    session.ranks.barrier()  # what other ranks are still reading must not be cut off
                    made = opened(file, path, mode, *args, **kwargs)
            elif rank:
                size = os.path.getsize(path) if "a" in mode and os.path.exists(path) else 0
                made = written_by_another(file, mode, size, *args, **kwargs)
            else:
                made = original(file, mode, *args, **kwargs)
            writers[path] = [*_still_open(writers.get(path, ())), ref(made)]
            return made

        return open

    return make
