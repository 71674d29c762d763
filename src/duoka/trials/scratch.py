"""A scratch folder for the files that a script writes; its own folders stay unchanged.

A read looks in the scratch folder first, under the absolute path, then at the original path. Removed files are
marked. All state is on the disk, so ranks and loader workers share it.

The functions of Python that read and write files are replaced. Writes of other programs, and of libraries that open
files in C, are not redirected, except those in `_OPENED`. What is done here calls `posix` functions, which are not.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import posix
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from duoka.plain.files import WRITE_FLAGS, Entries
from duoka.private.python import update_paths
from duoka.system.user_code import after_import

_REMOVED = ".gone"  # marks a file or folder that the script has removed
_LINKED = ".linked"  # marks that the script has made a symbolic link
MOST_LINKS = 40  # that are followed, one after the other, as by Linux
_CHUNK = 1 << 22


class Scratch:
    """The scratch folder of one run. A path is the script's; a copy is the same path inside the scratch folder."""

    def __init__(self, root: Path) -> None:
        self.files, self._gone, self.temporary = str(root / "files"), str(root / "gone"), str(root / "tmp")
        home = os.path.expanduser("~")
        caches = [os.path.join(home, name) for name in (".cache", ".triton", ".nv")]  # of libraries
        self._kept = tuple(os.path.join(path, "") for path in ("/dev", "/proc", "/sys", str(root.parent), *caches))
        self._marks: set[str] = set()  # those seen so far
        for folder in (self.files, self._gone, self.temporary):
            make_folders(folder)

    def original(self, path: str) -> str:
        """Return the original of a copy; of others the path itself."""
        return path.removeprefix(self.files) or "/"

    def scratch_path(self, path: Any) -> str | None:
        """Return a path's copy in the scratch folder; None if it is not a path, or stays where it is."""
        if not isinstance(path, (str, bytes, os.PathLike)) or path in ("", b"", ":memory:"):
            return None
        absolute = os.path.abspath(os.fsdecode(path))
        # Sockets, pipes and devices have no contents to copy.
        is_special = _kind(absolute) not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
        kept = is_special or os.path.join(absolute, "").startswith(self._kept)
        return None if kept else self.files + absolute

    def followed(self, path: Any, last: bool = True, most: int = MOST_LINKS) -> Any:
        """Return the original path behind links that the script has made. last: also where the path itself is one.

        The system would follow them to originals, which the script must not write into, or to files that only the
        scratch folder has. And it would take a relative path from the working directory, which may be a copy.
        """
        is_relative = isinstance(path, (str, bytes, os.PathLike)) and not os.path.isabs(path)
        is_in_copy = is_relative and _working_directory().startswith(self.files)
        copy = self.scratch_path(path) if most and (is_in_copy or self.has(_LINKED)) else None
        if copy is None:
            return path
        parts = self.original(copy).strip("/").split("/")
        for depth in range(1, len(parts) + last):
            at = "/".join([self.files, *parts[:depth]])
            if _kind(at) == stat.S_IFLNK:
                beside = os.path.dirname(self.original(at))
                return self.followed(os.path.join(beside, posix.readlink(at), *parts[depth:]), last, most - 1)
        return self.original(copy) if is_in_copy else path

    def path_to_read(self, path: Any) -> Any:
        copy = self.scratch_path(path)
        return copy if copy is not None and (exists(copy) or self.is_removed(copy)) else path

    def path_to_enter(self, path: Any) -> Any:
        """Return the folder to change into: the original one if it exists and the script has not removed it.

        Relative paths are then read from the scratch folder or, if it does not have them, from the original one.
        """
        copy = self.scratch_path(path)
        return path if copy is None or (is_folder(path) and not self.is_removed(copy)) else self.path_to_read(path)

    def path_to_create(self, path: Any) -> Any:
        """Return the path to create a file at, without the old contents.

        Raises FileNotFoundError if the folder does not exist.
        """
        copy = self.scratch_path(path)
        if copy is None:
            return path
        folder = os.path.dirname(copy)
        if not is_folder(self.path_to_read(self.original(folder))):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        make_folders(folder)
        return copy

    def path_to_modify(self, path: Any) -> Any:
        """Return the path to modify a file at, after copying the original there if it exists."""
        copy = self.scratch_path(path)
        if copy is None:
            return path
        path_of_original, copy = self.original(copy), str(self.path_to_create(path))
        if not exists(copy) and not self.is_removed(copy) and exists(path_of_original):
            if is_folder(path_of_original):
                make_folders(copy)
            else:
                _copy_file(path_of_original, copy)
        return copy

    def copy_in(self, path: Any) -> Any:
        """Return the path of a scratch copy of a file, or of a folder with its contents."""
        copy = self.scratch_path(path)
        if copy is None or self.is_removed(copy) or not is_folder(self.original(copy)):
            return self.path_to_modify(path)
        make_folders(copy)
        for name in posix.listdir(self.original(copy)):
            self.copy_in(os.path.join(self.original(copy), name))
        return copy

    def is_removed(self, copy: str) -> bool:
        """Return True if the script has removed the original of this copy, or a folder above it."""
        if not self.has(_REMOVED):
            return False
        parts = self.original(copy).strip("/").split("/")
        return any(exists("/".join([self._gone, *parts[:depth], _REMOVED])) for depth in range(1, len(parts) + 1))

    def has(self, mark: str) -> bool:
        """Return True if anything was marked in this way."""
        # Asked at each call: another rank, or a loader's worker, may have set the first one.
        if mark not in self._marks and exists(f"{self._gone}/{mark}"):
            self._marks.add(mark)
        return mark in self._marks

    def mark(self, mark: str, path: str = "") -> None:
        """Mark an original, or the scratch folder as a whole."""
        make_folders(self._gone + path)
        posix.close(posix.open(f"{self._gone}{path}/{mark}", os.O_WRONLY | os.O_CREAT, 0o600))

    def remove(self, copy: str) -> None:
        """Mark the original of this copy as removed."""
        self.mark(_REMOVED)
        self.mark(_REMOVED, self.original(copy))


# The system's own functions, not the replaced ones of `os`.


def _working_directory() -> str:
    with suppress(FileNotFoundError):  # it may be removed
        return posix.getcwd()
    return ""


def _kind(path: Any, status: Callable[[Any], os.stat_result] = posix.lstat) -> int:
    """Return the type of a file; 0 if there is none."""
    try:
        return stat.S_IFMT(status(path).st_mode)
    except (OSError, ValueError):
        return 0


def exists(path: Any) -> bool:
    """Return True if the path exists, also as a dangling link."""
    return _kind(path) != 0


def is_folder(path: Any) -> bool:
    """Return True for a folder or a link to one."""
    return _kind(path, posix.stat) == stat.S_IFDIR


def make_folders(path: str) -> None:
    """Create a folder and its parents."""
    if not is_folder(path):
        make_folders(os.path.dirname(path))
        with suppress(FileExistsError):  # another rank has created it
            posix.mkdir(path)


def _copy_file(source: str, target: str) -> None:
    """Copy a file; a dangling link stays a link."""
    if stat.S_ISLNK(posix.lstat(source).st_mode) and not exists(os.path.realpath(source)):
        posix.symlink(posix.readlink(source), target)
        return
    reading = posix.open(source, os.O_RDONLY)
    writing = posix.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, posix.fstat(reading).st_mode & 0o777 | 0o600)
    try:
        while chunk := posix.read(reading, _CHUNK):
            while chunk:  # a write may take a part
                chunk = chunk[posix.write(writing, chunk) :]
    finally:
        posix.close(reading)
        posix.close(writing)


_READ = "stat lstat access readlink statvfs listxattr getxattr"
_CHANGED = "truncate chmod chown utime setxattr removexattr"
_NEW = "mkfifo mknod"
_OF_LINKS = ("lstat", "readlink", "mkfifo", "mknod")  # which do not follow a link

# Functions that open files in C: module, function, index and name of the path argument, and the method of `Scratch`
# that maps the path.
_OPENED = (
    ("torch", "load", 0, "f", "path_to_read"),
    ("torch", "save", 1, "f", "path_to_create"),
    ("torch.jit", "load", 0, "f", "path_to_read"),
    ("torch.jit", "save", 1, "f", "path_to_create"),
    ("numpy", "savetxt", 0, "fname", "path_to_create"),
    ("numpy.lib._datasource", "open", 0, "path", "path_to_read"),  # used by loadtxt and genfromtxt
    ("sqlite3", "connect", 0, "database", "path_to_modify"),
    ("safetensors.torch", "serialize_file", 1, "filename", "path_to_create"),
    ("safetensors.torch", "safe_open", 0, "filename", "path_to_read"),
    ("safetensors.numpy", "serialize_file", 1, "filename", "path_to_create"),
)

Act = Callable[..., Any]  # what a replaced function does: it is called with the original function and its arguments


def redirect(scratch: Scratch) -> None:
    """Redirect writes in this process and in those that it forks."""
    tempfile.tempdir = scratch.temporary
    _replace(io, "open", partial(_open, scratch))
    builtins.open = io.open  # which were one function
    _replace(os, "open", partial(_open_descriptor, scratch))
    _replace(os, "chdir", _mapped(scratch, 0, "path", scratch.path_to_enter))
    _replace(os, "getcwd", lambda original: scratch.original(original()))
    for names, choose in (
        (_READ, scratch.path_to_read),
        (_CHANGED, scratch.path_to_modify),
        (_NEW, scratch.path_to_create),
    ):
        for name in filter(partial(hasattr, os), names.split()):  # Linux alone has extended attributes
            _replace(os, name, _mapped(scratch, 0, "path", choose))
    for names, act in (
        ("mkdir", _mkdir),
        ("remove unlink rmdir", _remove),
        ("rename replace", _rename),
        ("symlink link", _link),
        ("listdir scandir", _list),
    ):
        for name in names.split():
            _replace(os, name, partial(act, scratch))
    _replace(shutil, "rmtree", partial(_rmtree, scratch))
    for name in dict.fromkeys(module for module, *_ in _OPENED):
        after_import(name, partial(_redirect_module, scratch))
    sqlite3.dbapi2.connect = sqlite3.connect  # one function under two names, too
    update_paths()


def _redirect_module(scratch: Scratch, imported: ModuleType) -> None:
    for module, name, at, key, how in _OPENED:
        if module == imported.__name__ and hasattr(imported, name):
            _replace(imported, name, _mapped(scratch, at, key, getattr(scratch, how)))


def _replace(space: Any, name: str, act: Act) -> None:
    """Replace a function, except for paths below an open folder, as `shutil.rmtree` gives them."""
    original = getattr(space, name)

    @wraps(original)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        below_folder = kwargs.get("dir_fd") is not None
        return original(*args, **kwargs) if below_folder else act(original, *args, **kwargs)

    setattr(space, name, redirected)


def _mapped(scratch: Scratch, at: int, key: str, choose: Callable[[Any], Any]) -> Act:
    """Return what calls the original with another path. at, key: position and name of the argument."""

    def act(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        last = original.__name__ not in _OF_LINKS and kwargs.get("follow_symlinks", True)
        if len(args) > at:
            args = (*args[:at], choose(scratch.followed(args[at], last)), *args[at + 1 :])
        elif key in kwargs:
            kwargs[key] = choose(scratch.followed(kwargs[key], last))
        return original(*args, **kwargs)

    return act


def _open(scratch: Scratch, original: Act, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    path = file if kwargs.get("opener") else scratch.followed(file)
    copy = None if kwargs.get("opener") else scratch.scratch_path(path)
    if copy is None:
        return original(path, mode, *args, **kwargs)
    if "x" in mode and exists(scratch.path_to_read(path)):
        raise _error(errno.EEXIST, file)
    if set(mode) & set("wx"):
        copy = scratch.path_to_create(path)
    else:
        copy = scratch.path_to_modify(path) if set(mode) & set("a+") else scratch.path_to_read(path)
    if set(mode) & set("wxa+") and is_folder(scratch.path_to_read(path)):
        raise _error(errno.EISDIR, file)
    try:
        return original(copy, mode, *args, **kwargs)
    except OSError as error:  # its text names the copy
        raise _error(error.errno or errno.EIO, file) from None


def _open_descriptor(scratch: Scratch, original: Act, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
    path = scratch.followed(path, not flags & os.O_NOFOLLOW)
    if scratch.scratch_path(path) is None:
        return original(path, flags, *args, **kwargs)
    if flags & os.O_EXCL and exists(scratch.path_to_read(path)):
        raise _error(errno.EEXIST, path)
    copy = scratch.path_to_modify(path) if flags & WRITE_FLAGS else scratch.path_to_read(path)
    return original(copy, flags, *args, **kwargs)


def _mkdir(scratch: Scratch, original: Act, path: Any, *args: Any, **kwargs: Any) -> None:
    path = scratch.followed(path, last=False)
    if scratch.scratch_path(path) is not None:
        if exists(scratch.path_to_read(path)):
            raise _error(errno.EEXIST, path)
        path = scratch.path_to_create(path)
    original(path, *args, **kwargs)


def _remove(scratch: Scratch, original: Act, path: Any, *args: Any, **kwargs: Any) -> None:
    path = scratch.followed(path, last=False)
    copy = scratch.scratch_path(path)
    if copy is None:
        original(path, *args, **kwargs)
        return
    seen, is_rmdir = scratch.path_to_read(path), original.__name__ == "rmdir"
    has_original = exists(scratch.original(copy)) and not scratch.is_removed(copy)
    if not exists(seen):
        raise _error(errno.ENOENT, path)
    if is_rmdir and os.listdir(path):
        raise _error(errno.ENOTEMPTY, path)
    if is_folder(seen) != is_rmdir and not os.path.islink(seen):  # `remove` also takes a link to a folder
        raise _error(errno.EISDIR if is_folder(seen) else errno.ENOTDIR, path)
    if exists(copy):
        original(copy, *args, **kwargs)
    if has_original:
        scratch.remove(copy)


def _rename(scratch: Scratch, original: Act, src: Any, dst: Any, **kwargs: Any) -> None:
    src, dst = (scratch.followed(path, last=False) for path in (src, dst))
    source = scratch.scratch_path(src)
    if source is not None and not exists(scratch.path_to_read(src)):
        raise _error(errno.ENOENT, src)
    # The copy moves; the original stays where it is, and counts as removed.
    original(src if source is None else scratch.copy_in(src), scratch.path_to_create(dst), **kwargs)
    if source is not None and exists(scratch.original(source)):
        scratch.remove(source)


def _link(scratch: Scratch, original: Act, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
    dst = scratch.followed(dst, last=False)
    if scratch.scratch_path(dst) is not None and exists(scratch.path_to_read(dst)):
        raise _error(errno.EEXIST, dst)
    if original.__name__ == "link":  # to a copy: through another name the script could write into the original
        src = scratch.path_to_modify(scratch.followed(src))
    else:
        scratch.mark(_LINKED)
    original(src, scratch.path_to_create(dst), *args, **kwargs)


def _list(scratch: Scratch, original: Act, path: Any = ".") -> Any:
    """List, for `listdir` or `scandir`, copies, and originals without a copy that the script has not removed."""
    path = scratch.followed(path)
    copy = scratch.scratch_path(path)
    if copy is None or not (exists(copy) or scratch.has(_REMOVED)):
        return original(path)
    is_removed, has_copy = scratch.is_removed(copy), is_folder(copy)
    folders = [os.fsencode(copy) if isinstance(path, bytes) else copy] if is_removed or has_copy else []
    if not is_removed and (is_folder(path) or not has_copy):
        folders.append(path)
    entries: dict[str, Any] = {}
    for folder in folders:
        for entry in original(folder):
            name = os.fsdecode(getattr(entry, "name", entry))
            if folder is not path or not scratch.is_removed(f"{copy}/{name}"):
                entries.setdefault(name, entry)  # the copy first
    return Entries(list(entries.values())) if original.__name__ == "scandir" else list(entries.values())


def _rmtree(scratch: Scratch, original: Act, path: Any, *args: Any, **kwargs: Any) -> None:
    path = scratch.followed(path, last=False)
    copy = scratch.scratch_path(path)
    if copy is None or not exists(scratch.original(copy)) or scratch.is_removed(copy):
        original(scratch.path_to_read(path), *args, **kwargs)
        return
    if exists(copy):
        original(copy, *args, **kwargs)
    scratch.remove(copy)


def _error(number: int, path: Any) -> OSError:
    """Return the system's error for the path that the script gave."""
    return OSError(number, os.strerror(number), os.fsdecode(path))
