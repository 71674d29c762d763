"""What a run may leave behind, besides processes: ports, shared memory, temporary files."""

from __future__ import annotations

import os
import posix  # a plain script's calls of `os` are answered by rank 0
import re
import time
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
OF_RUNS = re.compile(r"torch_|sem\.|psm_|pymp-|duoka-[0-9a-f]{8}-")  # how torch, Python and duoka name memory
TO_GO = 2.0  # seconds that the kernel may take to close what a killed process held


class Leftovers:
    """What is there before a run; `left` says what the run has added to it.

    temporary: the run's own temporary directory.
    """

    def __init__(self, temporary: Path) -> None:
        self._temporary = temporary
        self._shared = _names(SHARED_MEMORY)

    def left(self, listening: list[int]) -> list[str]:
        """What is left behind. listening: inodes of the sockets at which the run's processes listened.

        What comes and goes meanwhile is another program's.
        """
        deadline = time.monotonic() + TO_GO
        found = self._look(set(listening))
        while found and time.monotonic() < deadline:
            time.sleep(0.05)
            found &= self._look(set(listening))
        return sorted(found)

    def _look(self, listening: set[int]) -> set[str]:
        ports = {f"port {port}" for inode, port in listeners().items() if inode in listening}
        shared = set(filter(OF_RUNS.match, _names(SHARED_MEMORY) - self._shared))
        if shared:
            shared -= _held()  # by another program, which makes files there at the same time
        return ports | {f"/dev/shm/{name}" for name in shared} | _names(self._temporary)


def listeners() -> dict[int, int]:
    """The port of each TCP socket of this machine at which somebody listens, by its inode."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table) as file:
            for fields in map(str.split, file.readlines()[1:]):
                if fields[3] == "0A":
                    found[int(fields[9])] = int(fields[1].rpartition(":")[2], 16)
    return found


def sockets(pid: int) -> set[int]:
    """The inodes of the sockets that a process holds."""
    found = set()
    with suppress(OSError):
        for name in posix.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = posix.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:"):
                    found.add(int(target[8:-1]))
    return found


def _names(folder: Path) -> set[str]:
    with suppress(OSError):
        return set(os.listdir(folder))
    return set()


def _held() -> set[str]:
    """The names of the files in /dev/shm that some process has open or mapped, whatever it calls them.

    A semaphore's maker has it under the name at which glibc made it, before it was moved to its own.
    """
    held = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/maps") as file:
            held |= {int(line.split()[4]) for line in file if "/dev/shm/" in line}
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    held.add(os.stat(f"/proc/{pid}/fd/{name}").st_ino)
    found = set()
    for name in _names(SHARED_MEMORY):
        with suppress(OSError):
            if os.stat(SHARED_MEMORY / name).st_ino in held:
                found.add(name)
    return found
