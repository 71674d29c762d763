"""Messages between the commands of a run on several machines.

Machine 0 is connected to each of the others. Each message, unless it is for machine 0 alone, goes through machine 0
to all machines, the sender included, so that all receive all messages in the same order. `joining.py` makes the
connections, and `duoka.network.connection` authenticates them.

A machine is lost when its command ends, which closes its connection, or when its power or network fails: TCP
keepalive finds that after `SILENT` seconds, however busy the commands are.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from duoka.network.connection import LONGEST, TO_SEND, Connection

LOST = "lost"
FOR_FIRST = "for machine 0: "  # in front of the names of messages that machine 0 does not pass on


class Message(NamedTuple):
    """The last message of a machine under a name. at: CLOCK_MONOTONIC when it was received here."""

    value: Any
    at: float


class Channel:
    """This machine's connections: of machine 0 to each of the others, of each of these to machine 0.

    number: of this machine. connections: by the number of the other machine. lost: the machines that are gone, with
    the reason. file: a descriptor that is readable when `read` has work to do. address: of this machine, as the
    others see it. host: machine 0's, as this one sees it.
    """

    def __init__(self, number: int, connections: Mapping[int, Connection]) -> None:
        self.number, self.lost = number, dict[int, str]()
        self.connections = dict(connections)
        first = next(iter(connections.values()))
        self.address, self.host = first.address, first.peer if number else first.address
        self._messages: dict[str, dict[int, Message]] = {}
        self._selector = selectors.EpollSelector()
        self.file = self._selector.fileno()
        for machine, connection in connections.items():
            connection.longest = LONGEST
            connection.socket.settimeout(TO_SEND)
            self._selector.register(connection.socket, selectors.EVENT_READ, machine)
            for what, sender, value in connection.buffered():  # received together with the last line of joining
                self._receive(what, sender if number else machine, value)

    def messages(self, what: str) -> Mapping[int, Message]:
        """Return the last message of each machine under this name, in the order in which all received them."""
        return self._messages.get(what, {})

    def send(self, what: str, value: Any) -> None:
        """Send a value under a name to all machines; if the name begins with `FOR_FIRST`, to machine 0 only."""
        if self.number == 0:
            self._receive(what, 0, value)
        else:
            self._write(0, what, self.number, value)

    def read(self) -> None:
        """Receive what has arrived, without waiting."""
        for key, _ in self._selector.select(0):
            if (connection := self.connections.get(key.data)) is None:  # lost meanwhile
                continue
            try:
                for what, number, value in connection.receive():
                    self._receive(what, number if self.number else key.data, value)
            except (OSError, ValueError) as error:
                self._lose(key.data, error)

    def _receive(self, what: str, sender: int, value: Any) -> None:
        """Keep a message; machine 0 passes it on to all others, and back to its sender."""
        if what == LOST:
            self.lost.setdefault(sender, value)
        else:
            self._messages.setdefault(what, {})[sender] = Message(value, time.monotonic())
        if self.number == 0 and not what.startswith(FOR_FIRST):
            for machine in list(self.connections):
                self._write(machine, what, sender, value)

    def _write(self, machine: int, what: str, sender: int, value: Any) -> None:
        if (connection := self.connections.get(machine)) is not None:
            try:
                connection.send(what, sender, value)
            except OSError as error:
                self._lose(machine, error)

    def _lose(self, machine: int, error: Exception) -> None:
        if (connection := self.connections.pop(machine, None)) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._receive(LOST, machine, reason(error))

    def close_files(self) -> None:
        """Close all files; in a worker this leaves the command's connections open."""
        for connection in self.connections.values():
            connection.socket.close()
        self._selector.close()

    def close(self) -> None:
        """End the connections, also for loader workers that hold a copy of them."""
        for connection in self.connections.values():
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
        self.close_files()


def reason(error: Exception) -> str:
    """Return why a connection failed, in a few words."""
    return getattr(error, "strerror", None) or str(error)
