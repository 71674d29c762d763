"""A network of two machines that are namespaces of this one, with a switch between them that holds each packet back.

The switch is a process that reads packets from one machine's network device and writes them to the other's, later:
a network emulator of the kernel (`tc qdisc add ... netem`) is not to be had everywhere. Only root can make it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ADDRESSES = ("10.213.78.1", "10.213.78.2")
_NAMES = tuple(f"duoka-switch-{number}" for number in range(2))
DEVICE = "dk0"
_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000  # <linux/if_tun.h>
_NETWORK_NAMESPACE = 0x40000000  # <sched.h>
_CONGESTION = "net.ipv4.tcp_congestion_control=reno"  # is to be had everywhere, and does not pace what is sent
_LONGEST = 65536  # bytes of a packet


def is_possible() -> bool:
    """Whether this process may make such a network here."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and Path("/dev/net/tun").exists()


def on_machine(number: int, command: Sequence[str | Path]) -> list[str | Path]:
    """The command, to be run on machine 0 or 1."""
    return ["ip", "netns", "exec", _NAMES[number], *command]


@contextmanager
def network(round_trip: float) -> Iterator[None]:
    """Two machines at `ADDRESSES` for as long as the context lasts. round_trip: in seconds, both ways together."""
    switch = 0
    try:
        ends = [_machine(number) for number in range(2)]
        switch = os.fork()
        if switch == 0:
            _pass_on(ends, round_trip / 2)
        for end in ends:
            os.close(end)
        yield
    finally:
        if switch:
            os.kill(switch, signal.SIGKILL)
            os.waitpid(switch, 0)
        for name in _NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _machine(number: int) -> int:
    """Make a machine; the file through which the packets of its network device come and go."""
    name = _NAMES[number]
    _ip("netns", "add", name)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    theirs = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        _enter(theirs)
        end = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TAP | _NO_HEADER))
    finally:
        _enter(home)
        os.close(home)
        os.close(theirs)
    _ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", DEVICE)
    for device in ("lo", DEVICE):
        _ip("-n", name, "link", "set", device, "up")
    subprocess.run(on_machine(number, ["sysctl", "-q", "-w", _CONGESTION]), check=True)
    return end


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NETWORK_NAMESPACE):  # os.setns is Python 3.12's
        raise OSError(ctypes.get_errno(), "setns")


def _pass_on(ends: list[int], delay: float) -> Any:
    """Hold every packet back for `delay` seconds, for ever."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))  # or it waits for whoever computes
    coming: deque[tuple[float, int, bytes]] = deque()
    try:
        while True:
            wait = max(0.0, coming[0][0] - time.monotonic()) if coming else None
            readable, _, _ = select.select(ends, [], [], wait)
            now = time.monotonic()
            for end in readable:
                coming.append((now + delay, ends[1 - ends.index(end)], os.read(end, _LONGEST)))
            while coming and coming[0][0] <= time.monotonic():
                _, end, packet = coming.popleft()
                os.write(end, packet)
    finally:
        os._exit(1)
