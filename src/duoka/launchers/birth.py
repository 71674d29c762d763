"""How a worker comes to life: a fork of the command process, with nothing left in it of its parent's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import IO

from duoka import traces
from duoka.launchers.signals import Signals, blocked
from duoka.libc import die_with, flush_c_streams


def fork(life: Callable[[], int], signals: Signals) -> int:
    """Start `life` in a child that leads its own session, and ends with the exit code that it returns.

    The child dies with this process. It has python's own signal handlers, and never runs this process's code.
    Returns its pid.
    """
    _flush()
    parent = os.getpid()
    with blocked():
        pid = os.fork()
        if pid == 0:
            _never_return(lambda: _begin(parent, signals))
    if pid == 0:
        _never_return(lambda: os._exit(life()))
    return pid


def _begin(parent: int, signals: Signals) -> None:
    die_with(parent)
    os.setsid()
    signals.restore()


def _never_return(step: Callable[[], None]) -> None:
    """Take a step of a child's life; what it raises ends the child here, not in its parent's code."""
    try:
        step()
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        with suppress(BaseException):
            print(traces.shown(error), end="", file=sys.stderr, flush=True)
        os._exit(1)


def redirect(output: IO[bytes] | None, stdin: bool) -> None:
    """Give this process its own standard streams.

    Args:
        output: the file for standard output and error; None leaves both as they are.
        stdin: whether it keeps standard input; if not, there is nothing to be read.
    """
    if not stdin:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    if output is not None:
        for name, stream in (("stdout", 1), ("stderr", 2)):
            os.dup2(output.fileno(), stream)
            _by_lines(name, stream)


def _by_lines(name: str, stream: int) -> None:
    """Let python write whole lines to a standard stream, so that the file is worth reading after a crash, too."""
    now = getattr(sys, name)
    if isinstance(now, TextIOWrapper):
        now.reconfigure(line_buffering=True)
    elif now is not None:  # a notebook's, which goes to its cell
        setattr(sys, name, open(stream, "w", buffering=1, closefd=False))  # noqa: SIM115


def _flush() -> None:
    """What is still in a buffer at the fork would be written once by each worker."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    flush_c_streams()
