"""Files opened by other functions than `open`: temporary files, descriptors, and folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

from duoka.plain.session import Session

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND  # a file opened with one is changed


def install(session: Session) -> None:
    """Intercept `os.open`, `os.scandir` and `tempfile`: rank 0 opens the file, the others a null or unnamed one."""
    for space, name, make in (
        (os, "open", _descriptors),
        (os, "scandir", _folders),
        (tempfile, "mkdtemp", _folders_made),
        (tempfile, "mkstemp", _temporary),
        (tempfile, "NamedTemporaryFile", _named),
    ):
        session.patches.replace(space, name, partial(make, session))


def _descriptors(session: Session, original: Callable[..., int]) -> Callable[..., int]:
    def open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:  # noqa: A001
        caller = session.caller
        where = os.path.abspath(os.fsdecode(path))
        if not flags & WRITE_FLAGS or caller.is_private(where) or not caller.is_joint():
            return original(path, flags, *args, **kwargs)
        opened: list[int] = []
        with caller.nested():
            session.ranks.barrier()
            session.first(lambda: opened.append(original(path, flags, *args, **kwargs)))
            caller.written.add(where)
            caller.change([where])
        return opened[0] if opened else original(os.devnull, os.O_RDWR)

    return open


def _temporary(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    def mkstemp(*args: Any, **kwargs: Any) -> tuple[int, str]:
        if not session.caller.shares_temporary(_folder(original, *args, **kwargs)):
            with session.caller.nested():
                descriptor, path = original(*args, **kwargs)
            session.caller.own_files.add(os.path.abspath(path))
            return descriptor, path
        opened: list[int] = []

        def make() -> str:
            descriptor, name = original(*args, **kwargs)
            opened.append(descriptor)
            return name  # type: ignore[no-any-return]

        with session.caller.nested():
            name = session.first(make)
            session.caller.written.add(name)
            session.caller.change([name])
            return opened[0] if opened else os.open(os.devnull, os.O_RDWR), name

    return mkstemp


def _named(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    def named_temporary_file(mode: str = "w+b", *args: Any, **kwargs: Any) -> Any:
        caller, made = session.caller, []
        if not caller.shares_temporary(_folder(original, mode, *args, **kwargs)):
            with caller.nested():
                file = original(mode, *args, **kwargs)
            caller.own_files.add(os.path.abspath(file.name))
            return file

        def make() -> str:
            made.append(original(mode, *args, **kwargs))
            return str(made[0].name)

        with caller.nested():
            name = session.first(make)
            caller.written.add(name)
            caller.change([name])
            file = made[0] if made else _own_copy(original, mode, *args, **kwargs)
        file.name, close = name, file.close

        def close_together() -> None:
            if caller.may_communicate():  # other ranks may still read it by name
                session.ranks.barrier()
            close()

        file.close = close_together
        return file

    return named_temporary_file


def _folders_made(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        caller = session.caller
        if not caller.shares_temporary(_folder(original, *args, **kwargs)):
            with caller.nested():
                folder = original(*args, **kwargs)
            caller.temporary.append(os.path.join(folder, ""))
            return folder
        with caller.nested():
            name = session.first(lambda: original(*args, **kwargs))
            caller.change([name])
            return name

    return mkdtemp


def _folder(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the folder that is given for a temporary file."""
    return signature(original).bind(*args, **kwargs).arguments.get("dir")


def _own_copy(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Open this rank's own temporary file outside of the script's folder; it is removed when it is closed."""
    call = signature(original).bind(*args, **kwargs)
    call.arguments.update(dir=None, delete=True)
    return original(*call.args, **call.kwargs)


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


def _folders(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    def scandir(path: Any = ".") -> Any:
        if isinstance(path, int) or not session.caller.asks_together(path) or not session.caller.is_joint():
            return original(path)
        with session.caller.nested():
            names = session.first(lambda: [entry.name for entry in original(path)])
            with original(path) as listing:
                entries = {entry.name: entry for entry in listing}
            session.ranks.barrier()  # no rank changes the folder before all have read it
        return Entries([entries[name] for name in names if name in entries])

    return scandir
