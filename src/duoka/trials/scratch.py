"""A folder in which a script's files lie that it has written, while its own folders stay as they are.

A file is looked for in the scratch folder first, under its whole path, and then in its own place: what the script
reads is what it would find. What it has removed is marked. All of that is on the disk, so that ranks and loader
workers see the same.

Looks at files below what `redirecting` replaces: it calls the system itself.
"""

from __future__ import annotations

import errno
import os
import posix
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

_GONE = ".gone"  # marks a file or folder that the script has removed
_CHUNK = 1 << 22


class Scratch:
    """The scratch folder of one run. Paths are what the script gave; places are where a file is really."""

    def __init__(self, root: Path) -> None:
        self.files, self._gone, self.temporary = str(root / "files"), str(root / "gone"), str(root / "tmp")
        home = os.path.expanduser("~")
        caches = [os.path.join(home, name) for name in (".cache", ".triton", ".nv")]  # of libraries
        self._kept = tuple(os.path.join(it, "") for it in ("/dev", "/proc", "/sys", str(root.parent), *caches))
        self._any_gone = False
        for folder in (self.files, self._gone, self.temporary):
            make_folders(folder)

    def own(self, place: str) -> str:
        """The path that a place in the scratch folder stands for."""
        return place[len(self.files) :]

    def place(self, path: Any) -> str | None:
        """A path's place in the scratch folder; None for what is no path, or stays where it is."""
        if not isinstance(path, (str, bytes, os.PathLike)) or path in ("", b"", ":memory:"):
            return None
        whole = os.path.abspath(os.fsdecode(path))
        return None if os.path.join(whole, "").startswith(self._kept) else self.files + whole

    def seen(self, path: Any) -> Any:
        """Where to read it."""
        place = self.place(path)
        return place if place is not None and (exists(place) or self.is_gone(place)) else path

    def folder(self, path: Any) -> Any:
        """Where to work in it: in its own place, if there is one, from where both are seen."""
        place = self.place(path)
        return path if place is None or (is_folder(path) and not self.is_gone(place)) else self.seen(path)

    def new(self, path: Any) -> Any:
        """Where to write it, when nothing of what is there is needed.

        Raises:
            FileNotFoundError: the folder that it is to be in is not there.
        """
        place = self.place(path)
        if place is None:
            return path
        folder = os.path.dirname(place)
        if not is_folder(self.seen(self.own(folder) or "/")):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        make_folders(folder)
        return place

    def changed(self, path: Any) -> Any:
        """Where to change it: a copy of what is there, if there is anything."""
        place = self.place(path)
        if place is None:
            return path
        own, place = self.own(place), str(self.new(path))
        if not exists(place) and not self.is_gone(place) and exists(own):
            if is_folder(own):
                make_folders(place)
            else:
                _copy(own, place)
        return place

    def copied(self, path: Any) -> Any:
        """Where a file is, or a folder with all that is in it, once it has been copied."""
        place = self.place(path)
        if place is None or self.is_gone(place) or not is_folder(self.own(place)):
            return self.changed(path)
        make_folders(place)
        for name in posix.listdir(self.own(place)):
            self.copied(os.path.join(self.own(place), name))
        return place

    def is_gone(self, place: str) -> bool:
        """Whether the script has removed what a place stands for, or a folder above it."""
        if not self.any_gone():
            return False
        parts = self.own(place).strip("/").split("/")
        return any(exists("/".join([self._gone, *parts[:depth], _GONE])) for depth in range(1, len(parts) + 1))

    def any_gone(self) -> bool:
        """Whether the script has removed anything that was there before it."""
        self._any_gone = self._any_gone or exists(f"{self._gone}/{_GONE}")
        return self._any_gone

    def remove(self, place: str) -> None:
        """Let what is in its own place not be seen any longer."""
        folder = self._gone + self.own(place)
        make_folders(folder)
        for at in (self._gone, folder):
            posix.close(posix.open(f"{at}/{_GONE}", os.O_WRONLY | os.O_CREAT, 0o600))


# The system's own functions, whatever `os` has been made to do.


def exists(path: Any) -> bool:
    """Whether there is something of that name."""
    try:
        posix.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: Any) -> bool:
    """Whether it is a folder, or a link to one."""
    try:
        return stat.S_ISDIR(posix.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def make_folders(path: str) -> None:
    """Make a folder and those above it."""
    if not is_folder(path):
        make_folders(os.path.dirname(path))
        with suppress(FileExistsError):  # another rank was quicker
            posix.mkdir(path)


def _copy(source: str, target: str) -> None:
    """Copy a file; a link stays a link."""
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
