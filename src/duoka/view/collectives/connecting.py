"""Connect the ranks of several machines, each to each, over TCP.

Each rank listens at a port that it publishes in torch's store, connects to the ranks before it, and accepts the ranks
after it. Both sides prove that they have the run's key (`duoka.network.connection`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from duoka.errors import TimedOut
from duoka.network.connection import Challenge, Connection, answer
from duoka.network.keys import Key

TO_CONNECT = 60.0  # seconds for the authentication of a connection
UNKNOWN = 64  # the most connections at a time that are not authenticated yet
BUFFER = 1 << 22  # bytes that the kernel may buffer for a connection, up to its own limit

Wire = tuple[socket.socket, bytes]  # a connection, and the bytes that were received already


def listen(address: str | None) -> socket.socket | None:
    """Return a socket that listens at any port of this address; None if that is not possible."""
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError):
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        return listener
    return None


def place_of(listener: socket.socket) -> str:
    """Return a socket's address and port as text, separated by a space."""
    address, port = listener.getsockname()[:2]
    return f"{address} {port}"


def gather_texts(store: Store, what: str, rank: int, world_size: int, value: str, timeout: float) -> list[str]:
    """Publish `value` in the store, and return every rank's, in the order of ranks.

    what: the key, with `{}` for the rank.

    Raises:
        TimedOut: some ranks did not publish theirs in `timeout` seconds.
    """
    keys = [what.format(other) for other in range(world_size)]
    store.set(keys[rank], value)
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        missing = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
        raise TimedOut(f"rank {rank} waited {timeout:g} s for ranks that did not connect: {missing}") from error
    return [store.get(key).decode() for key in keys]


def connect_all(
    listener: socket.socket, addresses: list[str], rank: int, key: Key, is_done: Callable[[int], bool]
) -> dict[int, Wire]:
    """Connect to the ranks before this one, accept those after it, and return the connections by rank.

    addresses: where each rank listens. is_done: returns True if a rank has stopped connecting.
    """
    wires: dict[int, Wire] = {}
    awaited = set(range(rank + 1, len(addresses)))
    deadline = time.monotonic() + TO_CONNECT
    listener.settimeout(0.02)
    with ThreadPoolExecutor(len(addresses) + UNKNOWN) as pool:
        asked = {other: pool.submit(_ask, addresses[other], rank, key) for other in range(rank)}
        greeted: dict[socket.socket, Future[tuple[int, Wire]]] = {}
        while awaited - wires.keys() and time.monotonic() < deadline:
            try:
                came = listener.accept()[0]
            except OSError:
                if not greeted and any(is_done(other) for other in awaited - wires.keys()):
                    break
            else:
                greeted[came] = pool.submit(_greet, came, key)
            for wire in [wire for wire, one in greeted.items() if one.done()]:
                with suppress(OSError, ValueError, TypeError):
                    number, found = greeted.pop(wire).result()
                    if number in awaited - wires.keys():
                        wires[number] = found
                    else:
                        wire.close()
            if len(greeted) > UNKNOWN:
                _shut(next(iter(greeted)))
        for wire in greeted:
            _shut(wire)
        for other, one_asked in asked.items():
            with suppress(OSError, ValueError):
                wires[other] = one_asked.result()
    return wires


def _shut(wire: socket.socket) -> None:
    """Shut down and close a connection."""
    with suppress(OSError):
        wire.shutdown(socket.SHUT_RDWR)


def _ask(place: str, rank: int, key: Key) -> Wire:
    """Connect to a rank, and answer its challenge."""
    host, _, port = place.rpartition(" ")
    wire = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        wire.settimeout(TO_CONNECT)
        wire.connect((host, int(port)))
        line = Connection(wire)
        _prepare(wire)
        answer(line, key, rank)
        return wire, line.unread()
    except BaseException:
        wire.close()
        raise


def _greet(wire: socket.socket, key: Key) -> tuple[int, Wire]:
    """Challenge a peer that has connected, and return its rank.

    Raises:
        ValueError: it did not answer correctly.
    """
    try:
        line = Connection(wire)
        _prepare(wire)
        challenge = Challenge(line, key)
        said: Iterable[tuple[str, int, Any]] = ()
        while not said:
            said = line.receive(most=1)
        what, number, value = next(iter(said))
        if what != "answer":
            raise ValueError(f"the first message is {what!r}, not the answer to the challenge")
        challenge.take(value)
        return number, (wire, line.unread())
    except BaseException:
        wire.close()
        raise


def _prepare(wire: socket.socket) -> None:
    wire.settimeout(TO_CONNECT)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
