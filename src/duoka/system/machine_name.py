"""A unique name of this machine."""

from __future__ import annotations

import os
import secrets
import socket
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
