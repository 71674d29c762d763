"""Messages between the commands of a run on several machines.

Machine 0 listens, and each of the others connects to it. Each message, unless it is for machine 0 alone, goes through
machine 0 to all machines, the sender included, so that all receive all messages in the same order.
`duoka.network.connection` authenticates them.

A machine is lost when its command ends, which closes its connection, or when its power or network fails: TCP
keepalive finds that after `SILENT` seconds, however busy the commands are.
"""

from __future__ import annotations

import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from duoka.errors import AskedError, TimedOut
from duoka.launchers.hello import Hello, SettingsDiffer, find_refusal
from duoka.launchers.listening import find, listen
from duoka.network.connection import LONGEST, TO_SEND, Challenge, Connection, WrongKey, answer
from duoka.network.keys import Key
from duoka.options import Machines
from duoka.system.messages import printable

PAUSE = 0.5  # seconds between two attempts to reach machine 0
MOST_PENDING = 64  # connections that have not authenticated yet
HELLO_TIMEOUT = 5.0  # seconds that each of them has to authenticate
LOST = "lost"
FOR_FIRST = "for machine 0: "  # in front of the names of messages that machine 0 does not pass on

ReportWait = Callable[[str], None]  # called with a text that names whom this machine waits for


class Message(NamedTuple):
    """The last message of a machine under a name. at: CLOCK_MONOTONIC when it was received here."""

    value: Any
    at: float


class Channel(ABC):
    """This machine's end of the connections.

    number: of this machine. lost: the machines that are gone, with the reason.
    """

    def __init__(self, machines: Machines, key: Key) -> None:
        self.machines, self.number, self.key = machines, machines.number, key
        self.lost: dict[int, str] = {}
        self._messages: dict[str, dict[int, Message]] = {}
        self._selector = selectors.EpollSelector()

    @abstractmethod
    def connect(self, hello: Hello, seconds: float, report_wait: ReportWait) -> list[Hello]:
        """Wait up to `seconds` for all machines; return the first message of each, in the order of machines.

        report_wait: called again and again with a text that names the machines it waits for.

        Raises:
            TimedOut: a machine did not connect in time.
            AskedError: the machines cannot compute together.
            SettingsDiffer: their settings differ.
            OptionError: machine 0 cannot listen there.
        """

    @abstractmethod
    def send(self, what: str, value: Any) -> None:
        """Send a value under a name to all machines; if the name begins with `FOR_FIRST`, to machine 0 only."""

    @abstractmethod
    def read(self) -> None:
        """Receive what has arrived, without waiting."""

    @property
    @abstractmethod
    def address(self) -> str:
        """This machine's address, as the others see it."""

    @property
    @abstractmethod
    def host(self) -> str:
        """Machine 0's address, as this machine sees it."""

    def messages(self, what: str) -> Mapping[int, Message]:
        """Return the last message of each machine under this name, in the order in which all received them."""
        return self._messages.get(what, {})

    @property
    def file(self) -> int:
        """A file descriptor that is readable when `read` has work to do."""
        return self._selector.fileno()

    @abstractmethod
    def connections(self) -> list[Connection]:
        """Return the open connections."""

    def close_files(self) -> None:
        """Close all files; in a worker this leaves the command's connections open."""
        for connection in self.connections():
            connection.socket.close()
        self._selector.close()

    def close(self) -> None:
        """End the connections, also for loader workers that hold a copy of them."""
        for connection in self.connections():
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)  # loader workers still hold copies
        self.close_files()

    def _store(self, what: str, number: int, value: Any) -> None:
        if what == LOST:
            self.lost.setdefault(number, value)
        else:
            self._messages.setdefault(what, {})[number] = Message(value, time.monotonic())


class PendingConnection:
    """A connection whose other end has not yet shown that it has the key."""

    def __init__(self, accepted: socket.socket, key: Key) -> None:
        self.connection, self.since = Connection(accepted), time.monotonic()
        self._challenge = Challenge(self.connection, key)
        self._number = -1

    def hello(self) -> tuple[int, Hello] | None:
        """Return the machine number and the first message, once they have come from an end that has the key.

        Raises:
            OSError: the connection is closed, or the other end does not have the key.
            ValueError: the other end is no command of duoka.
        """
        for what, number, value in self.connection.receive():
            if self.connection.is_secured:
                if what != "hello" or number != self._number:
                    raise ValueError("not the first message of a duoka command")
                return number, Hello.of(value)
            if what != "answer":
                raise ValueError("not the first message of a duoka command")
            self._number = number
            self._challenge.take(value)
        return None


class HostChannel(Channel):
    """Machine 0's end, which forwards all messages."""

    def __init__(self, machines: Machines, key: Key) -> None:
        super().__init__(machines, key)
        self._connections: dict[int, Connection] = {}
        self._pending: list[PendingConnection] = []
        self._last_refusal = ""

    def connect(self, hello: Hello, seconds: float, report_wait: ReportWait) -> list[Hello]:
        deadline = time.monotonic() + seconds
        accepted = {self.number: hello}
        try:
            with listen(self.machines) as listener:
                self._selector.register(listener, selectors.EVENT_READ)
                while missing := [number for number in range(self.machines.count) if number not in accepted]:
                    left = deadline - time.monotonic()
                    names = self._named(missing)
                    report_wait(f"waiting for {names} at {self.machines.place}{self._last_refusal}")
                    if left <= 0:
                        me, where = self.machines.called(0), f"at {self.machines.place} in {seconds:g} s"
                        raise TimedOut(f"{me} gave up waiting for {names}: no connection {where}{self._last_refusal}")
                    for key, _ in self._selector.select(min(left, PAUSE)):
                        if key.fileobj is listener:
                            self._accept(listener)
                        elif isinstance(key.data, PendingConnection):
                            self._read_hello(key.data, accepted)
                        else:
                            self._drop_if_closed(key.data, accepted)
                    self._drop_expired(time.monotonic() - HELLO_TIMEOUT)
                self._selector.unregister(listener)
            hellos = [accepted[number] for number in sorted(accepted)]
            self._broadcast("accepted", 0, [asdict(one) for one in hellos])
            return hellos
        except AskedError as error:
            self._broadcast("refused", 0, ["", str(error)])
            raise
        finally:
            while self._pending:
                self._drop_pending(self._pending[0])

    def _named(self, missing: list[int]) -> str:
        """Return `machine 1 and machine 2`, with at most eight names."""
        named = [f"{self.machines.each} {number}" for number in missing[:8]]
        return " and ".join(named) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")

    @property
    def address(self) -> str:
        return next(iter(self._connections.values())).address

    @property
    def host(self) -> str:
        return self.address

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection; drop the oldest pending one if there are too many."""
        try:
            accepted = listener.accept()[0]
        except OSError:  # closed again; or too many open files, and a pending one must be dropped first
            accepted = None
        if accepted is None or len(self._pending) >= MOST_PENDING:
            self._drop_pending(*self._pending[:1])
        if accepted is not None:
            try:
                pending = PendingConnection(accepted, self.key)
            except OSError:
                accepted.close()
                return
            self._pending.append(pending)
            self._selector.register(accepted, selectors.EVENT_READ, pending)

    def _read_hello(self, pending: PendingConnection, accepted: dict[int, Hello]) -> None:
        """Read a first message; drop the connection if it is not of this run."""
        if pending not in self._pending:  # dropped meanwhile
            return
        try:
            said = pending.hello()
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, WrongKey):
                self._last_refusal = f"; {printable(error)}: give all the same DUOKA_KEY or --key-file"
            self._drop_pending(pending)
            return
        if said is None:
            return
        number, hello = said
        refusal = find_refusal(number, hello, accepted, self.machines)
        if refusal is None:
            self._pending.remove(pending)
            pending.connection.longest = LONGEST
            self._connections[number], accepted[number] = pending.connection, hello
            self._selector.modify(pending.connection.socket, selectors.EVENT_READ, pending.connection)
            return
        differs = refusal.what if isinstance(refusal, SettingsDiffer) else ""
        with suppress(OSError):
            pending.connection.send("refused", 0, [differs, str(refusal)])
        who = f"{self.machines.each} {number} ({hello.name})"
        self._last_refusal = f"; {who} connected and was refused: {refusal}"
        self._drop_pending(pending)
        if self.machines.engine and self.key.is_given:  # only this job has its key: no other machine will connect
            raise refusal

    def _drop_if_closed(self, connection: Connection, accepted: dict[int, Hello]) -> None:
        """Drop a connection that has closed before all machines are connected; its machine may connect again."""
        number = self._number_of(connection)
        try:
            connection.receive()
        except (OSError, ValueError):
            self._drop(connection)
            if number is not None:
                del self._connections[number], accepted[number]

    def _drop_expired(self, since: float) -> None:
        """Drop the connections that have been pending since before `since`."""
        for pending in [one for one in self._pending if one.since < since]:
            self._drop_pending(pending)

    def _drop_pending(self, *dropped: PendingConnection) -> None:
        for pending in dropped:
            self._pending.remove(pending)
            self._drop(pending.connection)

    def send(self, what: str, value: Any) -> None:
        self._broadcast(what, self.number, value)

    def read(self) -> None:
        for key, _ in self._selector.select(0):
            number = self._number_of(key.data)
            if number is None:  # lost meanwhile
                continue
            try:
                for what, _, value in key.data.receive():
                    (self._store if what.startswith(FOR_FIRST) else self._broadcast)(what, number, value)
            except (OSError, ValueError) as error:
                self._lose(number, _words(error))

    def connections(self) -> list[Connection]:
        return list(self._connections.values())

    def _number_of(self, connection: Connection) -> int | None:
        return next((number for number, one in self._connections.items() if one is connection), None)

    def _broadcast(self, what: str, number: int, value: Any) -> None:
        self._store(what, number, value)
        for other, connection in list(self._connections.items()):
            try:
                connection.send(what, number, value)
            except OSError as error:
                self._lose(other, _words(error))

    def _lose(self, number: int, why: str) -> None:
        if (connection := self._connections.pop(number, None)) is not None:
            self._drop(connection)
            self._broadcast(LOST, number, why)

    def _drop(self, connection: Connection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()


class MemberChannel(Channel):
    """The end of any other machine."""

    def __init__(self, machines: Machines, key: Key) -> None:
        super().__init__(machines, key)
        self._connection: Connection | None = None

    def connect(self, hello: Hello, seconds: float, report_wait: ReportWait) -> list[Hello]:
        deadline = time.monotonic() + seconds
        why, host = "it did not answer", f"{self.machines.each} 0"
        while (left := deadline - time.monotonic()) > 0:
            report_wait(f"waiting for {host} at {self.machines.place}: {why}")
            try:
                return self._met(hello, deadline, min(left, TO_SEND), report_wait)
            except (OSError, ValueError) as error:
                why = printable(_words(error))
                time.sleep(min(left, PAUSE))
        me, place = self.machines.called(self.number), self.machines.place
        raise TimedOut(f"{me} gave up waiting for {host}: it did not answer at {place} in {seconds:g} s; {why}")

    def _met(self, hello: Hello, deadline: float, seconds: float, report_wait: ReportWait) -> list[Hello]:
        connection = Connection(socket.create_connection(find(self.machines, seconds), seconds))
        try:
            answer(connection, self.key, self.number)
            connection.longest = LONGEST
            connection.send("hello", self.number, asdict(hello))
            connection.socket.settimeout(PAUSE)
            while time.monotonic() < deadline:
                report_wait(f"waiting for the other {self.machines.each}s at {self.machines.place}")
                with suppress(TimeoutError):
                    for said in connection.receive():
                        self._store(*said)
                if refused := self.messages("refused"):
                    raise self._refused(*refused[0].value)
                if accepted := self.messages("accepted"):
                    self._connection = self._kept(connection)
                    return [Hello.of(one) for one in accepted[0].value]
        finally:
            if self._connection is None:
                connection.socket.close()
        raise TimeoutError(f"not all {self.machines.each}s connected")

    def _refused(self, what: str, text: str) -> AskedError:
        return SettingsDiffer(printable(what), 0, f"{self.machines.each} 0") if what else AskedError(printable(text))

    def _kept(self, connection: Connection) -> Connection:
        connection.socket.settimeout(TO_SEND)
        self._selector.register(connection.socket, selectors.EVENT_READ)
        return connection

    @property
    def address(self) -> str:
        assert self._connection is not None
        return self._connection.address

    @property
    def host(self) -> str:
        assert self._connection is not None
        return self._connection.peer

    def send(self, what: str, value: Any) -> None:
        if self._connection is not None:
            try:
                self._connection.send(what, self.number, value)
            except OSError as error:
                self._lose(_words(error))

    def read(self) -> None:
        while self._connection is not None and self._selector.select(0):
            try:
                for what, number, value in self._connection.receive():
                    self._store(what, number, value)
            except (OSError, ValueError) as error:
                self._lose(_words(error))

    def connections(self) -> list[Connection]:
        return [] if self._connection is None else [self._connection]

    def _lose(self, why: str) -> None:
        assert self._connection is not None
        self._selector.unregister(self._connection.socket)
        self._connection.socket.close()
        self._connection = None
        self._store(LOST, 0, why)


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def open_channel(machines: Machines, key: Key) -> Channel:
    """Return this machine's end. key: of the run."""
    return HostChannel(machines, key) if machines.number == 0 else MemberChannel(machines, key)
