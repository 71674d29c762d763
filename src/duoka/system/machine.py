"""What processes of this machine have in common: a unique name of it, and the folder of a user's shared files."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = "/dev/shm"


def machine_name() -> str:
    """Return a name that no other running machine has.

    Host names are not unique, and a container has one of its own; so it also holds the boot id and the shared
    memory's device number.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        memory = os.stat(SHARED_MEMORY)
    except OSError:
        return secrets.token_hex(16)
    return f"{socket.gethostname()} {boot} {memory.st_dev}"


def runtime_folder() -> Path:
    """Return the path of the folder `duoka` in the user's runtime directory, or of one in /tmp; it may not exist.

    XDG_RUNTIME_DIR is not read: a cron job has none, but must find the files of the user's sessions.
    """
    uid = os.getuid()
    session = Path(f"/run/user/{uid}")
    with suppress(OSError):
        if stat.S_ISDIR(session.lstat().st_mode) and os.access(session, os.W_OK):
            return session / "duoka"
    return Path(f"/tmp/duoka-{uid}")
