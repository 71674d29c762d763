"""Other programs that the script starts, and what it asks the machine: rank 0 does, and all have the result."""

from __future__ import annotations

import builtins
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from duoka.plain.patching import stand_in
from duoka.plain.session import Session

# (owner, names): rank 0 calls them if the script does; every rank has the result, or the exception.
COMMANDS: tuple[tuple[Any, str], ...] = (
    (os, "system"),
    (subprocess, "run call check_call check_output getoutput getstatusoutput"),
    (builtins, "input"),
    (shutil, "which"),
    (os, "cpu_count sched_getaffinity"),  # by which scripts set `num_workers`, on which streams depend
)

STREAMS = ("stdin", "stdout", "stderr", "buffer")
VALUES = ("returncode", "pid", "args", "encoding", "errors", "closed", "name", "mode", "line_buffering")


def install(session: Session) -> None:
    """Intercept the commands listed above, `subprocess.Popen`, `os.popen`, and standard input."""
    caller = session.caller

    def once(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not caller.is_script_call():
            return original(*args, **kwargs)
        return session.once(lambda: original(*args, **kwargs))  # all ranks have written what it reads

    for space, names in COMMANDS:
        session.patches.around(space, *names.split())(once)
    session.patches.around(os, "popen")(partial(_begin, session))
    popen = stand_in(subprocess.Popen, partial(_begin, session, subprocess.Popen), RemoteProxy)
    session.patches.put(subprocess, "Popen", popen)
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
        return self._session.first(question)


def _begin(session: Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a process, or open a stream, on rank 0, and return a proxy on every rank."""
    if not session.caller.is_script_call():
        return original(*args, **kwargs)
    with session.caller.nested():
        session.ranks.barrier()
    return RemoteProxy(session, session.open_first(lambda: original(*args, **kwargs))[0])
