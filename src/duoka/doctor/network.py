"""What makes several machines hang: names that lead nowhere, and clocks that differ."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from duoka import environment, libc
from duoka.doctor.finding import Finding
from duoka.patience import within

PATIENCE = 5.0  # seconds
SLOW = 1.0  # seconds


def examine() -> Iterator[Finding]:
    """This machine's name and its clock."""
    yield of_name(socket.gethostname(), _resolve)
    yield of_localhost(_resolve)
    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        yield from of_interface(variable, environment.variable(variable), interfaces)
    yield of_clock(time.time(), Path(__file__).stat().st_mtime, libc.clock_is_synchronised())


def of_name(name: str, resolve: Callable[[str], list[str]]) -> Finding:
    """Whether the machine's own name leads to an address that others can reach."""
    begin = time.monotonic()
    addresses = _in_time(lambda: resolve(name))
    seconds = time.monotonic() - begin
    why = "machines of one job find each other by name; one machine alone is not affected"
    todo = "put it with its address into /etc/hosts, or give the master's address as a number"
    if addresses is None:
        return Finding("advice", "host name", f"{name} cannot be resolved (within {PATIENCE:g} s)", why, todo)
    what = f"{name} is {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        return Finding("advice", "host name", f"{what}, which no other machine can reach", why, todo)
    if seconds > SLOW:
        return Finding("advice", "host name", f"{what}, found after {seconds:.1f} s", why, "see /etc/resolv.conf")
    device = environment.network_device()
    return Finding("ok", "host name", f"{what}{f'; gloo uses {device}' if device else ''}")


def of_localhost(resolve: Callable[[str], list[str]]) -> Finding:
    """Whether `localhost` is this machine, as launchers take for granted."""
    addresses = _in_time(lambda: resolve("localhost"))
    if addresses and all(address.startswith("127.") or address == "::1" for address in addresses):
        return Finding("ok", "localhost", ", ".join(addresses))
    what = f"it is {', '.join(addresses)}" if addresses else f"it cannot be resolved (within {PATIENCE:g} s)"
    todo = "put `127.0.0.1 localhost` into /etc/hosts"
    return Finding("fault", "localhost", what, "torchrun and MASTER_ADDR=localhost find nobody", todo)


def of_interface(variable: str, names: str | None, interfaces: Sequence[str]) -> Iterator[Finding]:
    """Whether the network devices that a library was told to use are there. A name may be the beginning of one."""
    if names is None or names.startswith("^"):  # all but these
        return
    asked = [name.partition(":")[0] for name in names.lstrip("=").split(",")]
    if not any(there.startswith(name) for name in asked for there in interfaces):
        what = f"{variable}={names}, and this machine has {', '.join(interfaces)}"
        why, todo = "ranks cannot find each other", f"unset {variable}, or correct it"
        yield Finding("fault", "network device", what, why, todo)


def of_clock(now: float, installed: float, synchronised: bool | None) -> Finding:
    """Whether the clock is right, as far as that can be told."""
    why = "several machines compare times, and certificates are not valid yet"
    if now < installed:
        return Finding("fault", "clock", "it is before duoka was installed", why, "set the clock; run chrony or ntpd")
    if synchronised is False:
        return Finding("advice", "clock", "the kernel says it is not synchronised", why, "run chrony or ntpd")
    return Finding("ok", "clock", "synchronised" if synchronised else "plausible")


def _resolve(name: str) -> list[str]:
    return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})


def _in_time(ask: Callable[[], list[str]]) -> list[str] | None:
    """An answer, or None if none comes: a name server that is silent keeps one waiting."""
    try:
        return within(PATIENCE, ask)
    except OSError:  # also a TimeoutError
        return None
