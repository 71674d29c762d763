"""Other programs that the script starts: rank 0 starts them, and every rank has the result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from duoka.plain.session import Session

# (owner, names): rank 0 calls them; every rank has the result, or the exception.
COMMANDS: tuple[tuple[Any, str], ...] = (
    (os, "system"),
    (subprocess, "run call check_call check_output getoutput getstatusoutput"),
)

STREAMS = ("stdin", "stdout", "stderr", "buffer")
VALUES = ("returncode", "pid", "args", "encoding", "errors", "closed", "name", "mode", "line_buffering")


def install(session: Session) -> None:
    """Intercept the commands listed above, `subprocess.Popen`, `os.popen`, and standard input."""
    caller = session.caller

    def make_once(original: Callable[..., Any]) -> Callable[..., Any]:
        def once(*args: Any, **kwargs: Any) -> Any:
            if not caller.is_script_call():
                return original(*args, **kwargs)
            with caller.nested():
                session.ranks.barrier()  # all ranks have written what it reads
                return session.first(lambda: original(*args, **kwargs))

        return once

    for space, names in COMMANDS:
        for name in names.split():
            session.patches.replace(space, name, make_once)
    session.patches.put(subprocess, "Popen", _popen(session))
    session.patches.replace(os, "popen", partial(_begun_once, session))
    if sys.stdin is not None:
        session.patches.put(sys, "stdin", RemoteProxy(session, sys.stdin))


class RemoteProxy:
    """A process or stream of rank 0, which every rank uses with rank 0's results. Other threads use their own rank's.

    target: on rank 0 the process or stream; on the others None, or a stream that is not used.
    """

    def __init__(self, session: Session, target: Any) -> None:
        self._session, self._target = session, target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in STREAMS:
            there = self._ask(lambda: getattr(self._target, name) is not None)
            return RemoteProxy(self._session, getattr(self._target, name, None)) if there else None
        if name in VALUES:
            return self._ask(lambda: getattr(self._target, name))
        return lambda *args, **kwargs: self._ask(lambda: getattr(self._target, name)(*args, **kwargs))

    def __iter__(self) -> Iterator[Any]:
        while line := self.readline():
            yield line

    def __next__(self) -> Any:
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def __enter__(self) -> RemoteProxy:
        return self

    def __exit__(self, *error: Any) -> None:
        self._ask(lambda: self._target.__exit__(*error))

    def _ask(self, question: Callable[[], Any]) -> Any:
        if not self._session.caller.may_communicate():
            return None if self._target is None else question()
        with self._session.caller.nested():
            return self._session.first(question)


def _begun_once(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Start a process, or open a stream, on rank 0, and return a proxy on every rank."""

    def begin(*args: Any, **kwargs: Any) -> Any:
        if not session.caller.is_script_call():
            return original(*args, **kwargs)
        begun: list[Any] = []
        with session.caller.nested():
            session.ranks.barrier()
            session.first(lambda: begun.append(original(*args, **kwargs)))
        return RemoteProxy(session, begun[0] if begun else None)

    return begin


def _popen(session: Session) -> type:
    """Return a replacement of `subprocess.Popen` that starts the script's processes on rank 0."""
    original = subprocess.Popen
    begin = _begun_once(session, original)

    class Made(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (original, RemoteProxy))

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not Popen or not session.caller.is_script_call():
                return original(*args, **kwargs) if cls is Popen else super().__call__(*args, **kwargs)
            return begin(*args, **kwargs)

    class Popen(subprocess.Popen, metaclass=Made):  # type: ignore[type-arg]
        pass

    return Popen
