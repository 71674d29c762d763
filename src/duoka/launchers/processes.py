"""States and activity of processes, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

STATES = {
    "D": "is held up in the kernel, as by a disk or a network file system that does not answer",
    "T": "is stopped (SIGSTOP)",
    "t": "is held by a debugger",
    "Z": "has ended",
}


def session_members(sessions: Iterable[int]) -> list[int]:
    """Return the pids of the live processes in these POSIX sessions, named by their leaders' pids."""
    wanted = set(sessions)
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            state, session = _state_and_session(int(entry))
            if session in wanted and state != "Z":
                found.append(int(entry))
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid exists and has not ended."""
    return _state_and_session(pid)[0] not in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP (not by a debugger)."""
    return _state_and_session(pid)[0] == "T"


def work_done(session: int) -> int:
    """Return a number that grows while processes of a session use the CPU, read or write; it has no unit.

    CPU time counts in tenths of a second, so that a thread that polls does not count as work.
    """
    ticks = moved = 0
    for pid in session_members([session]):
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        with suppress(OSError), open(f"/proc/{pid}/io", "rb") as file:
            moved += sum(int(line.split()[1]) for line in file if line.startswith((b"rchar", b"wchar")))
    return ticks * 10 // os.sysconf("SC_CLK_TCK") + moved


def is_asleep(pid: int) -> bool:
    """Return whether a process sleeps, as opposed to computing."""
    return _state_and_session(pid)[0] == "S"


def odd_state(pid: int) -> str:
    """Return the reason why a process does not run, in words; empty if there is none."""
    return STATES.get(_state_and_session(pid)[0], "")


def _state_and_session(pid: int) -> tuple[str, int]:
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # the process name before may contain parentheses
        return fields[0].decode(), int(fields[3])
    return "", -1
