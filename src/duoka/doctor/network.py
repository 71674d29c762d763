"""Causes of hangs on several machines: host names that do not resolve, and clocks that differ."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from duoka.doctor import Finding, advice, fault, ok
from duoka.system import environment, libc
from duoka.system.time_limit import within

RESOLVE_LIMIT = 5.0  # seconds
SLOW = 1.0  # seconds


def examine() -> Iterator[Finding]:
    """Check this machine's name, network devices and clock."""
    yield check_host_name(socket.gethostname(), _resolve)
    yield check_localhost(_resolve)
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable, value in environment.ending_in("SOCKET_IFNAME"):  # of gloo, and of vendors' collectives
        yield from check_interface(variable, value, interfaces)
    yield check_clock(time.time(), Path(__file__).stat().st_mtime, libc.clock_is_synchronised())


def check_host_name(name: str, resolve: Callable[[str], list[str]]) -> Finding:
    """Check that the machine's own name resolves to an address that other machines can reach."""
    begin = time.monotonic()
    addresses = _in_time(lambda: resolve(name))
    seconds = time.monotonic() - begin
    why = "machines of one job connect by name; jobs on one machine are not affected"
    todo = "add it to /etc/hosts, or give the master's IP address"
    if addresses is None:
        return advice("host name", f"{name} cannot be resolved (within {RESOLVE_LIMIT:g} s)", why, todo)
    what = f"{name} is {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        return advice("host name", f"{what}, which no other machine can reach", why, todo)
    if seconds > SLOW:
        return advice("host name", f"{what}, found after {seconds:.1f} s", why, "see /etc/resolv.conf")
    device = environment.variable("GLOO_SOCKET_IFNAME")
    return ok("host name", f"{what}{f'; gloo uses {device}' if device else ''}")


def check_localhost(resolve: Callable[[str], list[str]]) -> Finding:
    """Check that `localhost` resolves to this machine, as launchers assume."""
    addresses = _in_time(lambda: resolve("localhost"))
    if addresses and all(address.startswith("127.") or address == "::1" for address in addresses):
        return ok("localhost", ", ".join(addresses))
    what = f"it is {', '.join(addresses)}" if addresses else f"it cannot be resolved (within {RESOLVE_LIMIT:g} s)"
    todo = "put `127.0.0.1 localhost` into /etc/hosts"
    return fault("localhost", what, "torchrun and MASTER_ADDR=localhost cannot connect", todo)


def check_interface(variable: str, names: str, interfaces: Sequence[str]) -> Iterator[Finding]:
    """Check that the network devices named in a variable exist. A name may be a prefix."""
    if names.startswith("^"):  # all devices except these
        return
    asked = [name.partition(":")[0] for name in names.lstrip("=").split(",")]
    if not any(there.startswith(name) for name in asked for there in interfaces):
        what = f"{variable}={names}, but this machine has {', '.join(interfaces)}"
        why, todo = "ranks cannot connect", f"unset {variable}, or correct it"
        yield fault("network device", what, why, todo)


def check_clock(now: float, installed: float, synchronised: bool | None) -> Finding:
    """Check the clock: not before the installation of duoka, and synchronised if the kernel says so."""
    why = "several machines compare times, and certificates are not valid yet"
    if now < installed:
        return fault("clock", "it is before duoka was installed", why, "set the clock; run chrony or ntpd")
    if synchronised is False:
        return advice("clock", "the kernel says it is not synchronised", why, "run chrony or ntpd")
    return ok("clock", "synchronised" if synchronised else "plausible")


def _resolve(name: str) -> list[str]:
    return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})


def _in_time(ask: Callable[[], list[str]]) -> list[str] | None:
    """Resolve a name within the time limit; None if that fails: a silent name server blocks for long."""
    try:
        return within(RESOLVE_LIMIT, ask)
    except OSError:  # TimeoutError is an OSError
        return None
