"""Addresses and network interfaces of this machine, and sockets that listen there."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
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
    ipv4 = _ipv4_of(device)
    if ipv4 is None:
        with suppress(OSError):
            for line in _IPV6.read_text().splitlines():
                digits, _, _, scope, _, name = line.split()
                if name == device and scope in ("00", "10"):  # global, or this host
                    return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ipv4


def _ipv4_of(device: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", device.encode()))
        return socket.inet_ntoa(answer[20:24])
    return None


def listen_on(host: str, port: int) -> socket.socket:
    """Open a listening socket on the network of this address only. port: 0 for any.

    It is open to all networks if the name belongs to no address of this machine (a forwarded port), or to loopback
    only, as the host's own name often does. Raises OSError if the port is in use.
    """
    resolved: list[tuple[socket.AddressFamily, str]] = []
    with suppress(OSError):  # the name is unknown here
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        resolved = [(family, str(address[0])) for family, _, _, _, address in infos]
    for family, address in resolved:
        if _is_loopback(address) and not (_is_loopback(host) or host.lower() == "localhost"):
            continue
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return listen_on_all(port)


def listen_on_all(port: int) -> socket.socket:
    """Open a listening socket on all networks of this machine. port: 0 for any."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host.partition("%")[0]).is_loopback)
    return False
