"""Processes, as the kernel reports them in /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")  # a second
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessStat(NamedTuple):
    """The state of a process.

    name: of its program, cut. state: a letter of proc(5). parent, session: pids. cpu: seconds of all its threads.
    started: seconds since the machine started. memory: bytes that it has in memory.
    """

    name: str
    state: str
    parent: int
    session: int
    cpu: float
    started: float
    memory: int


def process_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if it does not exist, or is not visible."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
        name, _, rest = text.partition("(")[2].rpartition(")")  # the name may contain parentheses
        fields = rest.split()
        cpu, started = (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]) / _TICKS
        return ProcessStat(name, fields[0], int(fields[1]), int(fields[3]), cpu, started, int(fields[21]) * _PAGE)
    return None
