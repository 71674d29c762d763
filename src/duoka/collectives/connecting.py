"""Connect the ranks of several machines, each to each, over TCP.

Each rank listens at a port that it publishes in torch's store, connects to the ranks before it, and accepts the ranks
after it. Both sides prove that they have the run's key (`duoka.network.connection`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial

from torch.distributed import Store  # type: ignore[attr-defined]

from duoka.errors import TimedOut
from duoka.network.connection import Connection, Reception, answer, challenge
from duoka.network.keys import Key

TO_CONNECT = 60.0  # seconds for the authentication of a connection
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


def address_of_listener(listener: socket.socket) -> str:
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
    with (
        ThreadPoolExecutor(len(addresses)) as pool,
        Reception(listener, partial(_greet, key=key), TO_CONNECT) as reception,
    ):
        asked = {other: pool.submit(_ask, addresses[other], rank, key) for other in range(rank)}
        while awaited - wires.keys() and time.monotonic() < deadline:
            greetings = reception.poll()
            if not greetings and not reception and any(is_done(other) for other in awaited - wires.keys()):
                break
            for greeting in greetings:
                with suppress(OSError, ValueError, TypeError):
                    number, (wire, received) = greeting.result()
                    if number in awaited - wires.keys():
                        wires[number] = wire, received
                    else:
                        wire.close()
        for other, connecting in asked.items():
            with suppress(OSError, ValueError):
                wires[other] = connecting.result()
    return wires


def _ask(address: str, rank: int, key: Key) -> Wire:
    """Connect to a rank, and answer its challenge."""
    host, _, port = address.rpartition(" ")
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
        return challenge(line, key), (wire, line.unread())
    except BaseException:
        wire.close()
        raise


def _prepare(wire: socket.socket) -> None:
    wire.settimeout(TO_CONNECT)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
