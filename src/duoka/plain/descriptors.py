"""Files opened by other functions than `open`: temporary files, descriptors, and folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

from duoka.plain.session import Session

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND  # a file opened with one is changed


def install(session: Session) -> None:
    """Intercept `os.open`, `os.scandir` and `tempfile`: rank 0 opens the file, the others a null or unnamed one."""
    caller, patches = session.caller, session.patches

    def written(path: str) -> None:
        caller.written.add(path)
        caller.change([path])

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
            written(where)
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
            written(name)
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
            written(name)
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
