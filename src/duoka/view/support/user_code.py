"""The line of the user's script that is running: collectives and reports name it."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import FrameType

import torch
from greenlet import getcurrent

_PATHS = sysconfig.get_paths()
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (
    _PATHS["purelib"],
    _PATHS["platlib"],
    _TORCH,
    str(Path(__file__).parents[2]),
)
# They run a script's loop, or open files for it: what they do to files they do for the script, on every rank alike.
_RUN_LOOPS = """
accelerate fsspec ignite imageio lightning lightning_fabric lightning_utilities numpy pandas PIL pytorch_lightning
scipy transformers trl
"""
_FOR_SCRIPTS = tuple(
    f"{path}/{name}/" for path in (_PATHS["purelib"], _PATHS["platlib"]) for name in _RUN_LOOPS.split()
)
_STANDARD = (_PATHS["stdlib"], "<")  # and what is compiled while a program runs, as dataclasses and SQLAlchemy do
_TYPED = ("<stdin>", "<ipython")


@lru_cache(maxsize=4096)
def is_standard(filename: str) -> bool:
    """Whether code of this file is Python's own (site-packages may lie inside of its folder)."""
    return filename.startswith(_STANDARD) and not filename.startswith((*_LIBRARIES, *_TYPED))


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether code of this file is neither Python's, nor a library's, nor duoka's."""
    return not filename.startswith(_LIBRARIES) and not is_standard(filename)


@lru_cache(maxsize=4096)
def is_for_scripts(filename: str) -> bool:
    """Whether code of this file belongs to a library that acts for the script that calls it."""
    return filename.startswith(_FOR_SCRIPTS)


def is_users_frame(frame: FrameType) -> bool:
    """Whether a frame runs the user's code; what a library generates into a file is its own, wherever that lies."""
    return is_users(frame.f_code.co_filename) and not _is_librarys_module(frame.f_globals.get("__name__") or "")


@lru_cache(maxsize=4096)
def _is_librarys_module(name: str) -> bool:
    package, _, rest = name.partition(".")
    file = getattr(sys.modules.get(package), "__file__", None) if rest else None
    return isinstance(file, str) and file.startswith(_LIBRARIES)


def user_frame() -> FrameType | None:
    """The innermost frame that is the user's; None in a thread that has none (a device's backward thread)."""
    frame: FrameType | None = sys._getframe(1)
    turn = getcurrent()
    while frame is not None and not is_users_frame(frame):
        frame = frame.f_back
        if frame is None and turn.parent is not None:  # one of several shares: who let it work
            turn = turn.parent
            frame = turn.gr_frame
    return frame


def user_line() -> str:
    """`train.py:41`, or `?` where no frame is the user's."""
    frame = user_frame()
    return "?" if frame is None else f"{_basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@lru_cache(maxsize=4096)
def _basename(filename: str) -> str:
    return Path(filename).name
