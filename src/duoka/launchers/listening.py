"""Sockets on which machine 0 listens, and the address at which the others connect."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from duoka.errors import OptionError
from duoka.options import Machines

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def listen(machines: Machines) -> socket.socket:
    """Open the listening socket of machine 0.

    It accepts connections on the network of `--rendezvous`'s address only; on all networks if the name belongs to no
    address of this machine (a forwarded port), or to loopback only, as the host's own name often does.

    Raises:
        OptionError: the port is in use.
    """
    if machines.store:
        listener = open_to(_own_address(machines), 0)
        _publish(machines, listener)
        return listener
    try:
        return open_to(machines.host, machines.port)
    except OSError as error:
        raise OptionError("--rendezvous", machines.place, "at a port that is free on machine 0", str(error)) from None


def open_to(host: str, port: int) -> socket.socket:
    """Open a listening socket on the network of this address, as `listen` describes. port: 0 for any.

    Raises:
        OSError: the port is in use.
    """
    for family, address in _addresses(host, port):
        if _is_loopback(address) and not (_is_loopback(host) or host.lower() == "localhost"):
            continue
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return open_to_all(port)


def open_to_all(port: int) -> socket.socket:
    """Open a listening socket on all networks of this machine. port: 0 for any."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Resolve a host name; return an empty list if it is unknown here."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, str(address[0])) for family, _, _, _, address in found]
    return []


def _is_loopback(host: str) -> bool:
    """Return whether this is a loopback address."""
    try:
        return bool(ipaddress.ip_address(host.partition("%")[0]).is_loopback)
    except ValueError:
        return False


def find(machines: Machines, seconds: float) -> tuple[str, int]:
    """Return the address and port of machine 0, which may change when an engine restarts it.

    Raises:
        OSError: machine 0 has not published it yet.
    """
    if not machines.store:
        return machines.host, machines.port
    try:
        published = _store(machines, seconds).get(_name(machines)).decode()
    except RuntimeError:  # torch's timeout
        raise TimeoutError("machine 0 has not published its address yet") from None
    host, _, port = published.rpartition(" ")
    if not port.isdecimal():
        raise ConnectionError("machine 0 has not published its address yet")
    return host, int(port)


def _publish(machines: Machines, listener: socket.socket) -> None:
    address, port = listener.getsockname()[:2]
    if ipaddress.ip_address(address).is_unspecified:
        address = machines.host
    try:
        _store(machines, 60.0).set(_name(machines), f"{address} {port}")
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise OptionError("MASTER_ADDR and MASTER_PORT", machines.place, "where torchrun's store is", text) from None


def _own_address(machines: Machines) -> str:
    """Return the address from which this machine reaches the engine's store, and hence the others reach it."""
    with suppress(OSError), socket.create_connection((machines.host, machines.port), 30.0) as wire:
        return str(wire.getsockname()[0]).removeprefix("::ffff:")
    return machines.host


def _store(machines: Machines, seconds: float) -> Store:
    from duoka.network.rendezvous import tcp_store

    limit = timedelta(seconds=max(1.0, seconds))
    return tcp_store(machines.host, machines.port, is_master=False, timeout=limit)


def _name(machines: Machines) -> str:
    return f"duoka/{machines.job}"
