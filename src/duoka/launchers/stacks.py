"""Reading what faulthandler wrote: the few lines of it that a person wants to see first."""

from __future__ import annotations

import re

from duoka.traces import OURS, RUNS_SCRIPTS

FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')


def excerpt(text: str, most: int = 8) -> list[str]:
    """The script's own innermost frames, of its main thread if that is among them; the innermost first.

    text: one dump of all threads, as faulthandler writes it.
    """
    threads = [_frames(block) for block in re.split(r"\n(?=Thread |Current thread )", text)]
    scripts = [frames for frames in threads if any(file == RUNS_SCRIPTS for file, _ in frames)]
    for frames in scripts or threads[-1:]:
        files = [file for file, _ in frames]
        inside = frames[: files.index(RUNS_SCRIPTS)] if RUNS_SCRIPTS in files else frames
        return [line for file, line in inside if not file.startswith(OURS)][:most]
    return []


def _frames(block: str) -> list[tuple[str, str]]:
    return [(match["file"], match[0]) for match in map(FRAME.match, block.splitlines()) if match]
