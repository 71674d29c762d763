"""States and activity of processes, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from duoka.system.processes import process_stat

STATES = {
    "D": "is held up in the kernel, as by a disk or a network file system that does not answer",
    "T": "is stopped (SIGSTOP)",
    "t": "is held by a debugger",
    "Z": "has ended",
}


def session_members(sessions: Iterable[int]) -> list[int]:
    """Return the pids of the live processes in these POSIX sessions, named by their leaders' pids."""
    wanted = set(sessions)
    stats = {int(entry): process_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    return [pid for pid, stat in stats.items() if stat is not None and stat.session in wanted and stat.state != "Z"]


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid exists and has not ended."""
    return _state(pid) not in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP (not by a debugger)."""
    return _state(pid) == "T"


def work_done(session: int) -> int:
    """Return a number that grows while processes of a session use the CPU, read or write; it has no unit.

    CPU time counts in tenths of a second, so that a thread that polls does not count as work.
    """
    cpu, moved = 0.0, 0
    for pid in session_members([session]):
        stat = process_stat(pid)
        cpu += 0.0 if stat is None else stat.cpu
        with suppress(OSError), open(f"/proc/{pid}/io", "rb") as file:
            moved += sum(int(line.split()[1]) for line in file if line.startswith((b"rchar", b"wchar")))
    return int(10 * cpu + 1e-6) + moved


def is_asleep(pid: int) -> bool:
    """Return whether a process sleeps, as opposed to computing."""
    return _state(pid) == "S"


def odd_state(pid: int) -> str:
    """Return the reason why a process does not run, in words; empty if there is none."""
    return STATES.get(_state(pid), "")


def _state(pid: int) -> str:
    stat = process_stat(pid)
    return "" if stat is None else stat.state
