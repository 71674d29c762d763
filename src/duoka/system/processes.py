"""The processes of this machine, as the kernel reports them in /proc.

What they have in common: the unique name of the machine, and the folder in which those of a user share files.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from duoka.system.messages import printable

_TICKS = os.sysconf("SC_CLK_TCK")  # a second
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LONGEST = 1 << 17  # characters of a command
_ODD_STATES = {
    "D": "is held up in the kernel, as by a disk, a network file system or a GPU that does not answer",
    "T": "is stopped (SIGSTOP)",
    "t": "is held by a debugger",
    "Z": "has ended",
}


class ProcessStat(NamedTuple):
    """The state of a process."""

    name: str  # of its program, cut
    state: str  # a letter of proc(5)
    parent: int
    session: int  # the pid of its leader
    cpu: float  # seconds of all its threads
    started: float  # seconds since the machine started
    memory: int  # bytes that it has in memory


def process_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process; None if it does not exist, or is not visible."""
    with suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
        name, _, rest = text.partition("(")[2].rpartition(")")  # the name may contain parentheses
        fields = rest.split()
        cpu, started = (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]) / _TICKS
        return ProcessStat(name, fields[0], int(fields[1]), int(fields[3]), cpu, started, int(fields[21]) * _PAGE)
    return None


def process_state(pid: int) -> str:
    """Return the letter of proc(5) for a process, such as S: it sleeps, T: stopped by SIGSTOP; empty without one."""
    stat = process_stat(pid)
    return "" if stat is None else stat.state


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid exists and has not ended."""
    return process_state(pid) not in ("", "Z")


def odd_state(pid: int) -> str:
    """Return the reason why a process does not run, in words; empty if there is none."""
    return _ODD_STATES.get(process_state(pid), "")


def describe(pid: int) -> tuple[str, str, float | None]:
    """Return user, command line and start of a process; empty and None if not visible, as from inside a container."""
    import pwd

    with suppress(OSError, ValueError, IndexError):
        owner = os.stat(f"/proc/{pid}").st_uid
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        stat = process_stat(pid)
        if stat is not None:
            begun = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started)  # since 1970
            user = str(owner)
            with suppress(KeyError):
                user = pwd.getpwuid(owner).pw_name
            return printable(user), printable(command, _LONGEST), begun
    return "", "", None


def session_members(sessions: Iterable[int], name: str = "") -> list[int]:
    """Return the pids of the live processes in these POSIX sessions, named by their leaders' pids.

    name: only processes with this name; empty: all.
    """
    wanted = set(sessions)
    stats = {int(entry): process_stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    members = {pid: stat for pid, stat in stats.items() if stat is not None and stat.session in wanted}
    return [pid for pid, stat in members.items() if stat.state != "Z" and name in ("", stat.name)]


def work_done(session: int) -> int:
    """Return a number that grows while processes of a session use the CPU, read or write; it has no unit.

    CPU time counts in tenths of a second, so that a thread that polls does not count as work.
    """
    cpu, moved = 0.0, 0
    for pid in session_members([session]):  # with loader workers, and programs that the script has started
        stat = process_stat(pid)
        cpu += 0.0 if stat is None else stat.cpu
        with suppress(OSError), open(f"/proc/{pid}/io", "rb") as file:
            moved += sum(int(line.split()[1]) for line in file if line.startswith((b"rchar", b"wchar")))
    return int(10 * cpu + 1e-6) + moved


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
        if S_ISDIR(session.lstat().st_mode) and os.access(session, os.W_OK):
            return session / "duoka"
    return Path(f"/tmp/duoka-{uid}")
