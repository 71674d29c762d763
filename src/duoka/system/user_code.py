"""Find the running line of the user's script, for collectives and messages."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

from greenlet import getcurrent

from duoka.system.modules import is_installed, is_users


def is_users_frame(frame: FrameType) -> bool:
    """Return True if a frame runs the user's code, and not code that a library generated into a file."""
    return is_users(frame.f_code.co_filename) and not _is_library_module(frame.f_globals.get("__name__") or "")


@lru_cache(maxsize=4096)
def _is_library_module(name: str) -> bool:
    package, _, rest = name.partition(".")
    file = getattr(sys.modules.get(package), "__file__", None) if rest else None
    return isinstance(file, str) and is_installed(file)


def outer_frames(innermost: FrameType) -> Iterator[FrameType]:
    """Yield this frame of the running thread and those that led to it, from the inside out."""
    frame: FrameType | None = innermost
    turn = getcurrent()
    while frame is not None:
        yield frame
        frame = frame.f_back
        if frame is None and turn.parent is not None:  # in the greenlet of a share: continue in its parent
            turn = turn.parent
            frame = turn.gr_frame


def user_frame() -> FrameType | None:
    """Return the innermost frame of the user's code; None in a thread without one (torch's backward threads)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # `outer_frames`, without a generator: this runs for each collective
        if is_users(frame.f_code.co_filename) and is_users_frame(frame):
            return frame
        outermost, frame = frame, frame.f_back
    return next(filter(is_users_frame, outer_frames(outermost)), None)


def is_called_by(functions: Collection[CodeType]) -> bool:
    """Return True if one of these functions is running."""
    return any(frame.f_code in functions for frame in outer_frames(sys._getframe(1)))


def user_line() -> str:
    """Return `train.py:41`, or `?` if no frame is the user's."""
    frame = user_frame()
    return "?" if frame is None else f"{_basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@lru_cache(maxsize=4096)
def _basename(filename: str) -> str:
    return Path(filename).name
