"""Files: changes are made once, by rank 0, and every rank has the result.

Only rank 0 writes a file that the script opens for writing; reading it back waits for all ranks. Queries (`exists`,
`listdir`, …) are answered by rank 0. Such calls of libraries and of other threads are not intercepted, nor are files
that libraries write to caches and temporary folders.
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
from duoka.plain.null_file import of_files_only, open_null_file
from duoka.plain.session import Session
from duoka.private.python import PATH_FUNCTIONS

# (owner, names): rank 0 calls them; the others wait for the result.
ACTIONS: tuple[tuple[Any, str], ...] = (
    (os, "mkdir makedirs remove unlink rename replace rmdir removedirs symlink link truncate"),
    (shutil, "copy copy2 copyfile copytree rmtree move unpack_archive make_archive"),
    (tarfile.TarFile, "extract extractall"),
    (zipfile.ZipFile, "extract extractall"),
    (np, "savetxt"),  # numpy has its own reference to `open`
    (Path, "mkdir unlink rename replace rmdir touch symlink_to"),
)
# (owner, names): answered by rank 0.
QUERIES: tuple[tuple[Any, str], ...] = (
    (os.path, "exists isfile isdir islink lexists getsize getmtime getatime getctime"),
    (os, "listdir access cpu_count sched_getaffinity"),  # scripts set num_workers by them, which changes streams
    (shutil, "which disk_usage"),
    (glob, "glob"),
    (Path, "exists is_file is_dir is_symlink stat"),
    (tempfile, "mkdtemp"),
    (builtins, "input"),
)


def install(session: Session) -> None:
    """Intercept `open` for writing, and the actions and queries listed above."""
    caller = session.caller

    def make_action(original: Callable[..., Any]) -> Callable[..., Any]:
        return make_once(original, changes=True)

    def make_once(original: Callable[..., Any], changes: bool = False) -> Callable[..., Any]:
        def once(*args: Any, **kwargs: Any) -> Any:
            if not caller.is_script_call() or _is_temporary(args, caller):
                result = original(*args, **kwargs)
                if original.__name__ == "mkdtemp":
                    caller.temporary.append(os.path.join(result, ""))
                return result
            with caller.nested():
                if changes:  # other ranks may still read the file
                    session.ranks.barrier()
                return session.first(lambda: original(*args, **kwargs))

        return once

    for make, table in ((make_action, ACTIONS), (make_once, QUERIES)):
        for space, names in table:
            for name in names.split():
                session.patches.replace(space, name, make)
    make_open = _opener(session, caller)
    session.patches.replace(builtins, "open", make_open)
    session.patches.replace(io, "open", make_open)
    if PATH_FUNCTIONS is not None:
        session.patches.put(PATH_FUNCTIONS, "open", staticmethod(io.open))
    for name in ("fsync", "fdatasync", "ftruncate"):
        session.patches.replace(os, name, of_files_only)


def _is_temporary(args: tuple[Any, ...], caller: Caller) -> bool:
    """Return whether the first argument is a path in a folder of this rank's own."""
    return bool(args) and isinstance(args[0], (str, os.PathLike)) and caller.is_temporary(os.path.abspath(args[0]))


def _still_open(files: Iterable[ref[Any]]) -> list[ref[Any]]:
    found = ((file, file()) for file in files)
    return [file for file, there in found if there is not None and not there.closed]


def _opener(session: Session, caller: Caller) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    written = caller.written
    read: set[str] = set()  # files read since they were written
    writers: dict[str, list[ref[Any]]] = {}  # the files as they were opened for writing
    rank = session.ranks.rank

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def written_by_another(file: Any, mode: str, size: int, *args: Any, **kwargs: Any) -> Any:
            """Return the file of a rank that does not write: a null file, or a copy of its own if it may read."""
            if "+" not in mode:
                return open_null_file(file, mode, *args, size=size, **kwargs)
            with tempfile.TemporaryFile() as unnamed:
                descriptor = os.dup(unnamed.fileno())
            copy = original(descriptor, "w+b" if "b" in mode else "w+", *args, **kwargs)
            if set(mode) & set("ra"):
                with original(file, "rb" if "b" in mode else "r", *args, **kwargs) as read_from:
                    copy.write(read_from.read())
                copy.seek(0, os.SEEK_END if "a" in mode else os.SEEK_SET)
            return copy

        def read_together(file: Any, path: str, mode: str, *args: Any, **kwargs: Any) -> Any:
            """Open a file for reading; a copy if rank 0 still writes it."""
            try:
                if _still_open(writers.get(path, ())):
                    with caller.nested():
                        return written_by_another(file, mode + "+", 0, *args, **kwargs)
                return original(file, mode, *args, **kwargs)
            finally:
                session.ranks.barrier()

        def opened(file: Any, path: str, mode: str, *args: Any, **kwargs: Any) -> Any:
            """Open a file on rank 0, and its counterparts on the other ranks; raise rank 0's error on all."""
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
                session.ranks.barrier()  # no rank writes before all have their copies
            return made

        def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
            if not isinstance(file, (str, bytes, os.PathLike)) or not session.patches.active or caller.is_nested():
                return original(file, mode, *args, **kwargs)
            path = os.path.abspath(os.fsdecode(file))
            if caller.is_apart() or path in caller.own_files:
                return original(file, mode, *args, **kwargs)
            if path in written and caller.may_communicate():  # rank 0 writes before it reaches this barrier
                read.add(path)
                session.ranks.barrier()
                if not set(mode) & set("wax+"):
                    return read_together(file, path, mode, *args, **kwargs)
            if not set(mode) & set("wax+") or caller.is_private(path) or kwargs.get("opener"):
                return original(file, mode, *args, **kwargs)
            if path in read and caller.may_communicate():  # all ranks have read it before
                read.discard(path)
                session.ranks.barrier()
            written.add(path)
            if caller.is_script_call():
                with caller.nested():
                    session.ranks.barrier()  # other ranks may still read what this truncates
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
