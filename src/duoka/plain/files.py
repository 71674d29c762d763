"""Files: changes are made once, by rank 0, and every rank has the result.

Only rank 0 writes a file that is opened for writing; reading it back waits for all ranks. Queries (`exists`,
`listdir`, …) are answered by rank 0. It does not matter who calls, the script or a library, but where: each rank has
the temporary files of its libraries and what they keep in caches for itself. In other threads and in the garbage
collector, which ranks enter at other times, rank 0 makes changes, and no rank waits.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import glob
import io
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np

from duoka.plain.caller import Caller
from duoka.plain.session import Session
from duoka.private.python import PATH_FUNCTIONS

# (owner, names): rank 0 calls them; the others wait for the result.
ACTIONS: tuple[tuple[Any, str], ...] = (
    (os, "mkdir makedirs remove unlink rename renames replace rmdir removedirs symlink link truncate chmod utime"),
    (shutil, "copy copy2 copyfile copytree rmtree move unpack_archive make_archive"),
    (tarfile.TarFile, "extract extractall"),
    (zipfile.ZipFile, "extract extractall"),
    (np, "savetxt"),  # numpy has its own reference to `open`
    (Path, "mkdir unlink rename replace rmdir touch chmod symlink_to"),
)
_MOVES = ("rename", "renames", "replace", "move")
_COPIES = ("copy", "copy2", "copyfile", "copytree", "symlink", "link", "unpack_archive", "extract", "extractall")
_PATHS = ("path", "src", "base_name", "filename", "fname", "name", "dst", "target", "new", "extract_dir")  # arguments
# (owner, names): answered by rank 0. The first argument is a path.
QUERIES: tuple[tuple[Any, str], ...] = (
    (os.path, "exists isfile isdir islink lexists getsize getmtime getatime getctime"),
    (os, "listdir access"),
    (shutil, "disk_usage"),
    (glob, "glob"),
    (Path, "exists is_file is_dir is_symlink stat"),
)
# The same of other things, if the script asks. It sets `num_workers` by the cores, which changes streams.
SETTINGS: tuple[tuple[Any, str], ...] = (
    (os, "cpu_count sched_getaffinity"),
    (shutil, "which"),
    (builtins, "input"),
)


def install(session: Session) -> None:
    """Intercept `open` for writing, and the actions and queries listed above."""
    caller, patches = session.caller, session.patches

    def act(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        paths = _paths(args, kwargs)
        if caller.is_private(paths[-1] if original.__name__ in (*_MOVES, *_COPIES) else paths[0]):
            return original(*args, **kwargs)
        if caller.is_unordered():
            makes_sure = session.ranks.rank == 0 or kwargs.get("exist_ok")
            return original(*args, **kwargs) if makes_sure else None
        if not caller.is_joint():
            return original(*args, **kwargs)
        caller.change(paths)
        result = session.once(lambda: original(*args, **kwargs))
        if session.ranks.rank and original.__name__ in _MOVES and caller.is_temporary(paths[0]):
            with caller.nested():
                shutil.rmtree(paths[0]) if os.path.isdir(paths[0]) else os.remove(paths[0])
        return result

    def ask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path = args[0] if args else "."
        is_path = isinstance(path, (str, bytes, os.PathLike))
        if not is_path or not caller.asks_together(path) or not caller.is_joint():
            return original(*args, **kwargs)
        return session.first(lambda: original(*args, **kwargs))

    def ask_for_script(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not caller.is_script_call():
            return original(*args, **kwargs)
        return session.first(lambda: original(*args, **kwargs))

    for function, table in ((act, ACTIONS), (ask, QUERIES), (ask_for_script, SETTINGS)):
        for space, names in table:
            patches.around(space, *names.split())(function)
    opening = _opening(session, caller)
    patches.around(builtins, "open")(opening)
    patches.around(io, "open")(opening)
    if PATH_FUNCTIONS is not None:
        patches.put(PATH_FUNCTIONS, "open", staticmethod(io.open))
    patches.around(os, "fsync", "fdatasync", "ftruncate")(of_files_only)
    patches.around(fcntl, "flock", "lockf")(of_files_only)


def _paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return the paths among the arguments of an action, absolute; without one, the current folder."""
    values = (*args[:2], *(kwargs[name] for name in _PATHS if name in kwargs))
    paths = [value for value in values if isinstance(value, (str, bytes, os.PathLike))]
    return [os.path.abspath(os.fsdecode(path)) for path in paths or ["."]]


def _still_open(files: Iterable[ref[Any]]) -> list[ref[Any]]:
    opened = ((file, file()) for file in files)
    return [file for file, there in opened if there is not None and not there.closed]


def _opening(session: Session, caller: Caller) -> Callable[..., Any]:
    writers: dict[str, list[ref[Any]]] = {}  # the files as they were opened for writing
    ranks, written = session.ranks, caller.written

    def written_by_another(
        original: Callable[..., Any], file: Any, mode: str, size: int, *args: Any, **kwargs: Any
    ) -> Any:
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

    def open(  # noqa: A001
        original: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(file, (str, bytes, os.PathLike)) or not session.patches.active or caller.is_nested():
            return original(file, mode, *args, **kwargs)
        path = os.path.abspath(os.fsdecode(file))
        if caller.is_apart() or path in caller.own_files:
            return original(file, mode, *args, **kwargs)
        writes = set(mode) & set("wax+")
        # The script may load by torch what another thread has saved.
        if not writes and path in written and (caller.is_script_call("torch") or caller.is_joint()):
            ranks.barrier()  # rank 0 has written
            try:
                if not _still_open(writers.get(path, ())):
                    return original(file, mode, *args, **kwargs)
                with caller.nested():  # rank 0 still writes it
                    return written_by_another(original, file, mode + "+", 0, *args, **kwargs)
            finally:
                ranks.barrier()
        if not writes or caller.is_private(path) or kwargs.get("opener"):
            return original(file, mode, *args, **kwargs)
        joint = caller.is_joint()
        written.add(path)
        caller.change([path])
        if joint:
            with caller.nested():
                ranks.barrier()  # other ranks may still read what this truncates
                made, size = session.open_first(lambda: original(file, mode, *args, **kwargs), _position)
                if ranks.rank:
                    made = written_by_another(original, file, mode, size, *args, **kwargs)
                if "r+" in mode.replace("b", "").replace("t", ""):
                    ranks.barrier()  # no rank writes before all have their copies
        elif ranks.rank:
            size = os.path.getsize(path) if "a" in mode and os.path.exists(path) else 0
            made = written_by_another(original, file, mode, size, *args, **kwargs)
        else:
            made = original(file, mode, *args, **kwargs)
        writers[path] = [*_still_open(writers.get(path, ())), ref(made)]
        return made

    return open


def _position(file: Any) -> int:
    return file.tell() if file.seekable() else 0


class NullFile(io.FileIO):
    """A file that discards what is written, and keeps the position and size that the file `name` would have."""

    def __init__(self, name: Any, *, size: int = 0, appends: bool = False) -> None:
        super().__init__(os.devnull, "w")
        self.name = name
        self._size = self._at = size
        self._appends = appends

    def write(self, data: Any) -> int:
        """Discard the data, and return its size in bytes."""
        count = memoryview(data).nbytes
        if count:  # writing nothing past the end does not extend a file
            self._at = (self._size if self._appends else self._at) + count
            self._size = max(self._size, self._at)
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, as in a file."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seekable(self) -> bool:
        """Return True."""
        return True

    def truncate(self, size: int | None = None) -> int:
        """Set the size, as of a file."""
        self._size = self._at if size is None else size
        return self._size


def open_null_file(
    name: Any,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    *,
    size: int = 0,
) -> Any:
    """Return a null file, with the arguments of `open` for writing. size: of the file that is appended to."""
    raw = NullFile(name, size=size, appends="a" in mode)
    if "b" in mode:
        return raw if buffering == 0 else io.BufferedWriter(raw)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, newline, line_buffering=buffering == 1)


def of_files_only(original: Callable[..., None], descriptor: Any, *args: Any) -> None:
    """Call `os.fsync` and the like, but not for null files, for which they fail."""
    status = os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())
    if not stat.S_ISCHR(status.st_mode) or status.st_rdev != os.stat(os.devnull).st_rdev:
        original(descriptor, *args)
