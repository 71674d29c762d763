"""Fork a worker from the command process, without its parent's signal handlers and streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import IO

from duoka.launchers.signals import Signals, blocked
from duoka.supervision import tracebacks
from duoka.system.libc import die_with, flush_c_streams


def fork(life: Callable[[], int], signals: Signals) -> int:
    """Fork a child that leads its own session, runs `life` and exits with the code that it returns.

    The child is killed when this process dies. It has Python's default signal handlers, and never returns to the
    caller's code. Returns its pid.
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
    """Call `step` in the child; an exception is printed and ends the child."""
    try:
        step()
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        with suppress(BaseException):
            print(tracebacks.shown(error), end="", file=sys.stderr, flush=True)
        os._exit(1)


def redirect(output: IO[bytes] | None, stdin: bool) -> None:
    """Redirect this process's standard streams.

    Args:
        output: the file for standard output and error; None leaves both as they are.
        stdin: keep standard input; otherwise it reads /dev/null.
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
    """Write each line of a standard stream at once, so that the log is complete when the process crashes."""
    now = getattr(sys, name)
    if isinstance(now, TextIOWrapper):
        now.reconfigure(line_buffering=True)
    elif now is not None:  # a notebook's stream, which writes to its cell
        setattr(sys, name, open(stream, "w", buffering=1, closefd=False))  # noqa: SIM115


def _flush() -> None:
    """Empty all output buffers before the fork; otherwise each worker would write their content again."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    flush_c_streams()
