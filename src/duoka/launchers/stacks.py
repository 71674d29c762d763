"""Find the script's frames in the stack dumps of faulthandler."""

from __future__ import annotations

import os
import re

from duoka.supervision.tracebacks import OURS, RUNS_SCRIPTS
from duoka.system.modules import is_installed, is_users

FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')


def excerpt(text: str, most: int = 8) -> list[str]:
    """Return the script's innermost frames, innermost first; those of its main thread if the dump has them.

    text: one dump of all threads, as faulthandler writes it. most: number of frames.
    """
    threads = [_inside(_frames(block)) for block in re.split(r"\n(?=Thread |Current thread )", text)]
    scripts = [frames for frames, in_script in threads if in_script]
    others = [frames for frames, _ in threads if any(is_users(file) for file, _ in frames)]
    for frames in scripts or others or [frames for frames, _ in threads[-1:]]:
        return [line for file, line in frames if not file.startswith(OURS)][:most]
    return []


def _inside(frames: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], bool]:
    """Return the frames below the one that runs the script, and whether the script runs in this thread."""
    files = [file for file, _ in frames]
    if RUNS_SCRIPTS in files:
        return frames[: files.index(RUNS_SCRIPTS)], True
    first = next((place for place, file in enumerate(files) if file.startswith(OURS)), len(files))
    return frames[:first], False


def users_line(text: str) -> str | None:
    """Return the innermost line of the user's code as `data.py:17`; None if there is none."""
    for frame in map(FRAME.match, excerpt(text)):
        if frame is not None and is_users(frame["file"]):
            return f"{os.path.basename(frame['file'])}:{frame['line']}"
    return None


def in_torch(text: str) -> bool:
    """Return whether the script's thread is inside a function of torch that it called."""
    frame = next(map(FRAME.match, excerpt(text, most=1)), None)
    return frame is not None and "torch" in frame["file"].split(os.sep)[:-1] and is_installed(frame["file"])


def in_debugger(text: str) -> bool:
    """Return whether a thread is in Python's debugger or one based on it."""
    return any(os.path.basename(file) == "bdb.py" for file, _ in _frames(text))


def _frames(block: str) -> list[tuple[str, str]]:
    return [(match["file"], match[0]) for match in map(FRAME.match, block.splitlines()) if match]
