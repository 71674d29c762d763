"""The user, command and start of a process, as the kernel reports them."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from duoka.system.messages import printable

LONGEST = 1 << 17  # characters of a command


def describe(pid: int) -> tuple[str, str, float | None]:
    """Return user, command line and start of a process; empty and None if not visible, as from inside a container."""
    with suppress(OSError, ValueError, IndexError):
        owner = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        return printable(_name(owner)), printable(command, LONGEST), _start(pid)
    return "", "", None


def _start(pid: int) -> float:
    """Return when a process started, in seconds since 1970."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
