"""Network interfaces of this machine, and their addresses."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_IPV6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IP address, such as `lo` or `eth0`; None if unknown."""
    for _, name in socket.if_nameindex():
        if _ipv4_of(name) == address:
            return name
    with suppress(OSError, ValueError):
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in _IPV6.read_text().splitlines():
            if line.startswith(wanted):
                return line.split()[-1]
    return None


def address_of(device: str) -> str | None:
    """Return an IPv4 address of the network interface `device`, or else an IPv6 address; None if it has neither."""
    found = _ipv4_of(device)
    if found is None:
        with suppress(OSError):
            for line in _IPV6.read_text().splitlines():
                digits, _, _, scope, _, name = line.split()
                if name == device and scope in ("00", "10"):  # global, or this host
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return found


def _ipv4_of(device: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", device.encode()))
        return socket.inet_ntoa(found[20:24])
    return None
