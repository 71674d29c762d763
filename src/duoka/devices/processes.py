"""The user and command of a process, as the kernel reports them."""

from __future__ import annotations

import os
from contextlib import suppress

from duoka.system.printable import printable

LONGEST = 1 << 17  # characters of a command


def describe(pid: int) -> tuple[str, str]:
    """Return user and command line of a process; empty if not visible, as from inside a container."""
    with suppress(OSError):
        owner = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        return printable(_name(owner)), printable(command, LONGEST)
    return "", ""


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
