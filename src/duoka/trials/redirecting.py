"""Redirect file writes of Python functions to a scratch folder; reads find the redirected files.

Writes of other programs, and of libraries that open files in C, are not redirected, except those in `_OPENED`.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from duoka.plain.descriptors import WRITE_FLAGS, Entries
from duoka.private.python import update_paths
from duoka.trials.scratch import Scratch, exists, is_folder

_READ = "stat lstat access readlink"
_CHANGED = "truncate chmod chown utime"
_NEW = "mkfifo mknod"

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

Make = Callable[[Callable[..., Any]], Callable[..., Any]]


def redirect(scratch: Scratch) -> None:
    """Redirect writes in this process and in those that it forks."""
    tempfile.tempdir = scratch.temporary
    _replace(io, "open", lambda original: _open(scratch, original))
    builtins.open = io.open
    _replace(os, "open", lambda original: _descriptor(scratch, original))
    _replace(os, "chdir", _redirected(0, "path", scratch.path_to_enter))
    for names, choose in (
        (_READ, scratch.path_to_read),
        (_CHANGED, scratch.path_to_modify),
        (_NEW, scratch.path_to_create),
    ):
        for name in names.split():
            _replace(os, name, _redirected(0, "path", choose))
    for name, make in (
        ("mkdir", _mkdir),
        ("remove", _remove),
        ("unlink", _remove),
        ("rmdir", _remove),
        ("rename", _rename),
        ("replace", _rename),
        ("symlink", _link),
        ("link", _link),
        ("listdir", _listdir),
        ("scandir", _scandir),
    ):
        _replace(os, name, functools.partial(make, scratch))
    _replace(shutil, "rmtree", lambda original: _rmtree(scratch, original))
    for module, name, at, key, how in _OPENED:
        if hasattr(sys.modules.get(module), name):
            _replace(sys.modules[module], name, _redirected(at, key, getattr(scratch, how)))
    sqlite3.dbapi2.connect = sqlite3.connect
    update_paths()


def _replace(space: Any, name: str, make: Make) -> None:
    original = getattr(space, name)
    setattr(space, name, functools.wraps(original)(make(original)))


def _redirected(at: int, key: str, choose: Callable[[Any], Any]) -> Make:
    """Return a decorator that maps a path argument by `choose`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def redirected(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is None and len(args) > at:
                args = (*args[:at], choose(args[at]), *args[at + 1 :])
            elif kwargs.get("dir_fd") is None and key in kwargs:
                kwargs[key] = choose(kwargs[key])
            return original(*args, **kwargs)

        return redirected

    return make


def _open(scratch: Scratch, original: Callable[..., Any]) -> Callable[..., Any]:
    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:  # noqa: A001
        place = None if kwargs.get("opener") else scratch.scratch_path(file)
        if place is None:
            return original(file, mode, *args, **kwargs)
        if "x" in mode and exists(scratch.path_to_read(file)):
            raise _error(errno.EEXIST, file)
        if set(mode) & set("wx"):
            place = scratch.path_to_create(file)
        else:
            place = scratch.path_to_modify(file) if set(mode) & set("a+") else scratch.path_to_read(file)
        if set(mode) & set("wxa+") and is_folder(scratch.path_to_read(file)):
            raise _error(errno.EISDIR, file)
        try:
            return original(place, mode, *args, **kwargs)
        except OSError as error:
            raise _error(error.errno or errno.EIO, file) from None

    return open


def _descriptor(scratch: Scratch, original: Callable[..., int]) -> Callable[..., int]:
    def open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:  # noqa: A001
        if kwargs.get("dir_fd") is not None or scratch.scratch_path(path) is None:
            return original(path, flags, *args, **kwargs)
        if flags & os.O_EXCL and exists(scratch.path_to_read(path)):
            raise _error(errno.EEXIST, path)
        place = scratch.path_to_modify(path) if flags & WRITE_FLAGS else scratch.path_to_read(path)
        return original(place, flags, *args, **kwargs)

    return open


def _mkdir(scratch: Scratch, original: Callable[..., None]) -> Callable[..., None]:
    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("dir_fd") is None and scratch.scratch_path(path) is not None:
            if exists(scratch.path_to_read(path)):
                raise _error(errno.EEXIST, path)
            path = scratch.path_to_create(path)
        original(path, *args, **kwargs)

    return mkdir


def _remove(scratch: Scratch, original: Callable[..., None]) -> Callable[..., None]:
    def remove(path: Any, *args: Any, **kwargs: Any) -> None:
        place = None if kwargs.get("dir_fd") is not None else scratch.scratch_path(path)
        if place is None:
            return original(path, *args, **kwargs)
        seen, is_own = scratch.path_to_read(path), exists(scratch.original(place)) and not scratch.is_removed(place)
        if not exists(seen):
            raise _error(errno.ENOENT, path)
        if original.__name__ == "rmdir" and os.listdir(path):
            raise _error(errno.ENOTEMPTY, path)
        if is_folder(seen) != (original.__name__ == "rmdir") and not os.path.islink(seen):
            raise _error(errno.EISDIR if is_folder(seen) else errno.ENOTDIR, path)
        if exists(place):
            original(place, *args, **kwargs)
        return scratch.remove(place) if is_own else None

    return remove


def _rename(scratch: Scratch, original: Callable[..., None]) -> Callable[..., None]:
    def rename(src: Any, dst: Any, **kwargs: Any) -> None:
        source = scratch.scratch_path(src)
        if source is not None and not exists(scratch.path_to_read(src)):
            raise _error(errno.ENOENT, src)
        original(src if source is None else scratch.copy_in(src), scratch.path_to_create(dst), **kwargs)
        if source is not None and exists(scratch.original(source)):
            scratch.remove(source)

    return rename


def _link(scratch: Scratch, original: Callable[..., None]) -> Callable[..., None]:
    def link(src: Any, dst: Any, **kwargs: Any) -> None:
        if scratch.scratch_path(dst) is not None and exists(scratch.path_to_read(dst)):
            raise _error(errno.EEXIST, dst)
        original(
            scratch.path_to_modify(src) if original.__name__ == "link" else src, scratch.path_to_create(dst), **kwargs
        )

    return link


def _listdir(scratch: Scratch, original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def listdir(path: Any = ".") -> list[Any]:
        place = scratch.scratch_path(path)
        if place is None:
            return original(path)
        here = original(os.fsencode(place) if isinstance(path, bytes) else place) if is_folder(place) else []
        if scratch.is_removed(place) or (here and not is_folder(path)):
            return here if is_folder(place) else original(place)
        own = original(path) if is_folder(path) or not is_folder(place) else []
        return [*here, *(it for it in own if it not in here and not scratch.is_removed(f"{place}/{os.fsdecode(it)}"))]

    return listdir


def _scandir(scratch: Scratch, original: Callable[..., Any]) -> Callable[..., Any]:
    def scandir(path: Any = ".") -> Any:
        place = scratch.scratch_path(path)
        if place is None or not (exists(place) or scratch.has_removed()):
            return original(path)
        here = list(original(place)) if is_folder(place) else []
        own = list(original(path)) if is_folder(path) and not scratch.is_removed(place) else []
        names = {os.fsdecode(it.name) for it in here}
        left = [it for it in own if os.fsdecode(it.name) not in names]
        return Entries([*here, *(it for it in left if not scratch.is_removed(f"{place}/{os.fsdecode(it.name)}"))])

    return scandir


def _rmtree(scratch: Scratch, original: Callable[..., Any]) -> Callable[..., Any]:
    def rmtree(path: Any, *args: Any, **kwargs: Any) -> Any:
        place = scratch.scratch_path(path)
        if place is None or not exists(scratch.original(place)) or scratch.is_removed(place):
            return original(scratch.path_to_read(path), *args, **kwargs)
        if exists(place):
            original(place, *args, **kwargs)
        return scratch.remove(place)

    return rmtree


def _error(number: int, path: Any) -> OSError:
    """Return the system's error for the path that the script gave."""
    return OSError(number, os.strerror(number), os.fsdecode(path))
