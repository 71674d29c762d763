"""The user, command and start of a process, as the kernel reports them."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from duoka.system.messages import printable
from duoka.system.processes import process_stat

LONGEST = 1 << 17  # characters of a command


def describe(pid: int) -> tuple[str, str, float | None]:
    """Return user, command line and start of a process; empty and None if not visible, as from inside a container."""
    with suppress(OSError, ValueError, IndexError):
        owner = os.stat(f"/proc/{pid}").st_uid
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        stat = process_stat(pid)
        if stat is not None:
            begun = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started)  # since 1970
            return printable(_name(owner)), printable(command, LONGEST), begun
    return "", "", None


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
