"""Errors for Python's debuggers in several workers, which share one terminal."""

from __future__ import annotations

import bdb
import pdb  # noqa: T100
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from duoka.errors import Refused
from duoka.planning.plan import Kind
from duoka.system import environment


def refuse(kind: Kind, world_size: int, rank: int) -> None:
    """Let breakpoints raise an error that says how to debug, in workers where a debugger would hang or end at once.

    Rank 0 of a script that knows its rank can be debugged: the terminal is its own. A debugger that does not read
    standard input, such as one on a socket, works everywhere.
    """
    if rank == 0 and kind is not Kind.PLAIN:
        return
    other = ", or call it on rank 0 alone" if kind is not Kind.PLAIN else ""

    def refusal(name: str, more: str = "") -> Refused:
        return Refused(
            f"{name} in {world_size} workers, which cannot share the terminal; use one device "
            f"(--devices cpu:1, --devices 0,), where it works as under python{other}{more}"
        )

    def refuse_breakpoint(*args: Any, **how: Any) -> None:
        raise refusal("breakpoint()", "; PYTHONBREAKPOINT=0 ignores it")

    if environment.variable("PYTHONBREAKPOINT") is None:
        sys.breakpointhook = refuse_breakpoint
    _check_before(bdb.Bdb, "set_trace", lambda: refusal("pdb"))
    _check_before(pdb.Pdb, "interaction", lambda: refusal("pdb"))  # pdb.post_mortem sets no trace


def _check_before(owner: Any, name: str, refusal: Callable[[], Refused]) -> None:
    """Let a debugger's method raise `refusal()` if it would read this process's standard input."""
    original = getattr(owner, name)

    def checked(self: Any, frame: FrameType | None = None, *args: Any, **how: Any) -> Any:
        if getattr(self, "stdin", sys.stdin) in (sys.stdin, sys.__stdin__):
            raise refusal()
        caller = sys._getframe(1) if name == "set_trace" else None  # its default: the caller's frame
        return original(self, frame or caller, *args, **how)

    setattr(owner, name, checked)
