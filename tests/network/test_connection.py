from __future__ import annotations

import socket
from pathlib import Path

import pytest

from duoka.network.connection import GUEST, HOST, LONGEST_HELLO, Channel, Connection, address_of, interface_of
from duoka.network.keys import Key

HAS_IPV6 = socket.has_dualstack_ipv6() and Path("/proc/net/if_inet6").exists()


def test_the_device_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert interface_of("no address") is None
    assert interface_of("::1") == ("lo" if HAS_IPV6 else None)


def test_the_address_of_a_device() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("no device") is None


def secured() -> tuple[Connection, Connection]:
    """Return the two ends of a connection without a key, of the host and the guest."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    host, guest = Connection(here), Connection(there)
    host.secure(Key(b""), HOST, GUEST)
    guest.secure(Key(b""), GUEST, HOST)
    return host, guest


def test_a_long_line_is_refused_until_the_machine_is_accepted() -> None:
    host, guest = secured()
    guest.send("hello", 1, "x" * LONGEST_HELLO)
    with host.socket, guest.socket, pytest.raises(ValueError, match="too long"):
        host.receive_one()

    host, guest = secured()
    channel = Channel(0, {1: host})
    with guest.socket:
        guest.send("for machine 0: text", 1, "x" * LONGEST_HELLO)
        while not channel.messages("for machine 0: text"):
            channel.read()
            assert not channel.lost
    channel.close()
