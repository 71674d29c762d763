from __future__ import annotations

import socket
from pathlib import Path

from duoka.network.connection import address_of, interface_of

HAS_IPV6 = socket.has_dualstack_ipv6() and Path("/proc/net/if_inet6").exists()


def test_the_device_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert interface_of("no address") is None
    assert interface_of("::1") == ("lo" if HAS_IPV6 else None)


def test_the_address_of_a_device() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("no device") is None
