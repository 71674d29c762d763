"""Files: changes are made once, by rank 0, and every rank has the result.

Only rank 0 writes a file that is opened for writing; reading it back waits for all ranks. Queries (`exists`,
`listdir`, …) are answered by rank 0. It does not matter who calls, the script or a library, but where: each rank has
the temporary files of its libraries and what they keep in caches for itself. In other threads and in the garbage
collector, which ranks enter at other times, rank 0 makes changes, and no rank waits.

The other ranks write to null files: what is written is discarded, and positions and sizes are as on rank 0.
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
import sys
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from filelock import AcquireReturnProxy, BaseFileLock  # which torch depends on

from duoka.plain.caller import Caller
from duoka.plain.session import Session
from duoka.private.python import OPEN_COPIES, PATH_FUNCTIONS

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
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND  # a file opened with one is changed


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

    for function, table in ((act, ACTIONS), (ask, QUERIES)):
        for space, names in table:
            patches.around(space, *names.split())(function)
    opening = _opening(session, caller)
    patches.around(builtins, "open")(opening)
    patches.around(io, "open")(opening)
    for module, name in OPEN_COPIES:
        if module in sys.modules:  # else it takes the one above when it is imported
            patches.put(sys.modules[module], name, io.open)
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
    ranks = session.ranks

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
        if not writes and path in caller.written and (caller.is_script_call("torch") or caller.is_joint()):
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
        caller.write(path)
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


def install_descriptors(session: Session) -> None:
    """Intercept `os.open`, `os.scandir` and `tempfile`: rank 0 opens the file, the others a null or unnamed one."""
    caller, patches = session.caller, session.patches

    def is_own(original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        """Return whether a temporary file with these arguments is this rank's own."""
        return not caller.shares_temporary(signature(original).bind(*args, **kwargs).arguments.get("dir"))

    @patches.around(os, "open")
    def open(original: Callable[..., int], path: Any, flags: int, *args: Any, **kwargs: Any) -> int:  # noqa: A001
        where = os.path.abspath(os.fsdecode(path))
        if not flags & WRITE_FLAGS or caller.is_private(where) or not caller.is_joint():
            return original(path, flags, *args, **kwargs)
        with caller.nested():
            session.ranks.barrier()
            descriptor, _ = session.open_first(lambda: original(path, flags, *args, **kwargs))
            caller.write(where)
        return original(os.devnull, os.O_RDWR) if descriptor is None else descriptor

    @patches.around(tempfile, "mkstemp")
    def mkstemp(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, str]:
        if is_own(original, *args, **kwargs):
            with caller.nested():
                descriptor, path = original(*args, **kwargs)
            caller.own_files.add(os.path.abspath(path))
            return descriptor, path
        with caller.nested():
            made, name = session.open_first(lambda: original(*args, **kwargs), lambda made: made[1])
            caller.write(name)
            return made[0] if made else os.open(os.devnull, os.O_RDWR), name

    @patches.around(tempfile, "NamedTemporaryFile")
    def named_temporary_file(original: Callable[..., Any], mode: str = "w+b", *args: Any, **kwargs: Any) -> Any:
        if is_own(original, mode, *args, **kwargs):
            with caller.nested():
                file = original(mode, *args, **kwargs)
            caller.own_files.add(os.path.abspath(file.name))
            return file
        with caller.nested():
            file, name = session.open_first(lambda: original(mode, *args, **kwargs), lambda file: str(file.name))
            caller.write(name)
            if file is None:  # this rank's own, outside of the script's folder, removed when it is closed
                call = signature(original).bind(mode, *args, **kwargs)
                call.arguments.update(dir=None, delete=True)
                file = original(*call.args, **call.kwargs)
        file.name, close = name, file.close

        def close_together() -> None:
            if caller.may_communicate():  # other ranks may still read it by name
                session.ranks.barrier()
            close()

        file.close = close_together
        return file

    @patches.around(tempfile, "mkdtemp")
    def mkdtemp(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if is_own(original, *args, **kwargs):
            with caller.nested():
                folder = original(*args, **kwargs)
            caller.temporary.append(os.path.join(folder, ""))
            return folder
        with caller.nested():
            name = session.first(lambda: original(*args, **kwargs))
            caller.change([name])
            return name

    @patches.around(os, "scandir")
    def scandir(original: Callable[..., Any], path: Any = ".") -> Any:
        if isinstance(path, int) or not caller.asks_together(path) or not caller.is_joint():
            return original(path)
        with caller.nested():
            names = session.first(lambda: [entry.name for entry in original(path)])
            with original(path) as listing:
                entries = {entry.name: entry for entry in listing}
            session.ranks.barrier()  # no rank changes the folder before all have read it
        return Entries([entries[name] for name in names if name in entries])


class Entries:
    """A replacement of the iterator that `os.scandir` returns, over a list."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the remaining entries."""
        self._entries = iter([])


def install_locks(session: Session) -> None:
    """Intercept `acquire` and `release` of `filelock`'s locks; the script's are taken once for all ranks.

    While a library holds a lock (as `datasets` does around its cache), its rank reads and writes files without the
    other ranks: these may wait for the lock, so waiting for them would be a deadlock.
    """
    caller = session.caller
    taken: WeakKeyDictionary[BaseFileLock, int] = WeakKeyDictionary()  # the script's locks -> times, on every rank

    @session.patches.around(BaseFileLock, "acquire")
    def acquire(original: Callable[..., Any], self: BaseFileLock, *args: Any, **kwargs: Any) -> Any:
        if caller.is_script_call(through="filelock"):
            session.first(lambda: original(self, *args, **kwargs) and None)
            taken[self] = taken.get(self, 0) + 1
            return AcquireReturnProxy(self)
        caller.locks[self] = threading.get_ident()  # it opens its file on each rank, too
        try:
            return original(self, *args, **kwargs)
        finally:
            if not self.is_locked:
                caller.locks.pop(self, None)

    @session.patches.around(BaseFileLock, "release")
    def release(original: Callable[..., Any], self: BaseFileLock, *args: Any, **kwargs: Any) -> None:
        # if in `taken`: the garbage collector releases others, on each rank at another time
        if self in taken and caller.is_script_call(through="filelock"):
            session.ranks.barrier()  # others may still change what it protects
            taken[self] -= 1
            if not taken[self]:
                del taken[self]
        original(self, *args, **kwargs)
        if not self.is_locked:
            caller.locks.pop(self, None)


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
