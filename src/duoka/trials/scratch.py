"""A scratch folder for the files that a script writes; its own folders stay unchanged.

A read looks in the scratch folder first, under the absolute path, then at the original path. Removed files are
marked. All state is on the disk, so ranks and loader workers share it.

This module is below `redirecting`, so it calls `posix` functions directly.
"""

from __future__ import annotations

import errno
import os
import posix
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

_REMOVED = ".gone"  # marks a file or folder that the script has removed
_CHUNK = 1 << 22


class Scratch:
    """The scratch folder of one run. A path is the script's; a place is the same path inside the scratch folder."""

    def __init__(self, root: Path) -> None:
        self.files, self._gone, self.temporary = str(root / "files"), str(root / "gone"), str(root / "tmp")
        home = os.path.expanduser("~")
        caches = [os.path.join(home, name) for name in (".cache", ".triton", ".nv")]  # of libraries
        self._kept = tuple(os.path.join(it, "") for it in ("/dev", "/proc", "/sys", str(root.parent), *caches))
        self._has_removed = False
        for folder in (self.files, self._gone, self.temporary):
            make_folders(folder)

    def original(self, place: str) -> str:
        """Return the original path of a place in the scratch folder."""
        return place[len(self.files) :]

    def scratch_path(self, path: Any) -> str | None:
        """Return a path's place in the scratch folder; None if it is not a path, or stays where it is."""
        if not isinstance(path, (str, bytes, os.PathLike)) or path in ("", b"", ":memory:"):
            return None
        whole = os.path.abspath(os.fsdecode(path))
        kept = os.path.join(whole, "").startswith(self._kept) or is_special(whole)
        return None if kept else self.files + whole

    def path_to_read(self, path: Any) -> Any:
        """Return the path to read from."""
        place = self.scratch_path(path)
        return place if place is not None and (exists(place) or self.is_removed(place)) else path

    def path_to_enter(self, path: Any) -> Any:
        """Return the folder to change into: the original one if it exists and the script has not removed it.

        Relative paths are then read from the scratch folder or, if it does not have them, from the original one.
        """
        place = self.scratch_path(path)
        return path if place is None or (is_folder(path) and not self.is_removed(place)) else self.path_to_read(path)

    def path_to_create(self, path: Any) -> Any:
        """Return the path to create a file at, without the old contents.

        Raises:
            FileNotFoundError: the folder does not exist.
        """
        place = self.scratch_path(path)
        if place is None:
            return path
        folder = os.path.dirname(place)
        if not is_folder(self.path_to_read(self.original(folder) or "/")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        make_folders(folder)
        return place

    def path_to_modify(self, path: Any) -> Any:
        """Return the path to modify a file at, after copying the original there if it exists."""
        place = self.scratch_path(path)
        if place is None:
            return path
        own, place = self.original(place), str(self.path_to_create(path))
        if not exists(place) and not self.is_removed(place) and exists(own):
            if is_folder(own):
                make_folders(place)
            else:
                _copy(own, place)
        return place

    def copy_in(self, path: Any) -> Any:
        """Return the path of a scratch copy of a file, or of a folder with its contents."""
        place = self.scratch_path(path)
        if place is None or self.is_removed(place) or not is_folder(self.original(place)):
            return self.path_to_modify(path)
        make_folders(place)
        for name in posix.listdir(self.original(place)):
            self.copy_in(os.path.join(self.original(place), name))
        return place

    def is_removed(self, place: str) -> bool:
        """Return True if the script has removed the original of this place, or a folder above it."""
        if not self.has_removed():
            return False
        parts = self.original(place).strip("/").split("/")
        return any(exists("/".join([self._gone, *parts[:depth], _REMOVED])) for depth in range(1, len(parts) + 1))

    def has_removed(self) -> bool:
        """Return True if the script has removed any original file."""
        self._has_removed = self._has_removed or exists(f"{self._gone}/{_REMOVED}")
        return self._has_removed

    def remove(self, place: str) -> None:
        """Mark the original of this place as removed."""
        folder = self._gone + self.original(place)
        make_folders(folder)
        for at in (self._gone, folder):
            posix.close(posix.open(f"{at}/{_REMOVED}", os.O_WRONLY | os.O_CREAT, 0o600))


# The system's own functions, not the replaced ones of `os`.


def exists(path: Any) -> bool:
    """Return True if the path exists, also as a dangling link."""
    try:
        posix.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: Any) -> bool:
    """Return True for a folder or a link to one."""
    try:
        return stat.S_ISDIR(posix.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_special(path: Any) -> bool:
    """Return True for a socket, a pipe or a device, which have no contents to copy: they stay where they are."""
    try:
        kind = stat.S_IFMT(posix.lstat(path).st_mode)
    except (OSError, ValueError):
        return False
    return kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)


def make_folders(path: str) -> None:
    """Create a folder and its parents."""
    if not is_folder(path):
        make_folders(os.path.dirname(path))
        with suppress(FileExistsError):  # another rank has created it
            posix.mkdir(path)


def _copy(source: str, target: str) -> None:
    """Copy a file; a dangling link stays a link."""
    if stat.S_ISLNK(posix.lstat(source).st_mode) and not exists(os.path.realpath(source)):
        posix.symlink(posix.readlink(source), target)
        return
    reading = posix.open(source, os.O_RDONLY)
    writing = posix.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, posix.fstat(reading).st_mode & 0o777 | 0o600)
    try:
        while chunk := posix.read(reading, _CHUNK):
            while chunk:
                chunk = chunk[posix.write(writing, chunk) :]
    finally:
        posix.close(reading)
        posix.close(writing)
