"""Authenticated TCP connections between processes of a run, for lines of JSON; a channel to all machines; addresses.

    host   ["challenge", 0, N]                       N, M: random numbers, used once
    guest  ["answer", 1, [M, HMAC(key, guest N M)]]
    host   ["proof", 0, HMAC(key, host N M)]         from here on each line begins with its HMAC, under a key of the
    guest  ["hello", 1, {...}]                       connection's own

An end without the key receives a random number and a refusal, and nothing that it sends is used. Parsing JSON
executes no code.

Machine 0 is connected to each of the others. Each message of the channel, unless it is for machine 0 alone, goes
through machine 0 to all machines, the sender included, so that all receive all messages in the same order. A machine
is lost when its command ends, which closes its connection, or when its power or network fails: TCP keepalive finds
that after `SILENT` seconds, however busy the commands are.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from duoka.network.keys import Key

T = TypeVar("T")
Line = tuple[str, int, Any]  # name, number of the sending machine or rank, value

SILENT = 30  # seconds
TO_SEND = 5.0  # seconds to send a line
LONGEST = 1 << 22  # bytes of one line
LONGEST_HELLO = 1 << 16  # the same before a machine is accepted: without a key it may be a stranger
MOST_UNKNOWN = 64  # connections at a time that are not authenticated yet
HOST, GUEST = b"host", b"guest"
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_IPV6 = Path("/proc/net/if_inet6")
LOST = "lost"
FOR_FIRST = "for machine 0: "  # in front of the names of messages that machine 0 does not pass on
NO_PROTOCOL = "received a message that is not part of duoka's protocol"


class WrongKey(ConnectionError):
    """The other end has another key."""


class Connection:
    """A connection for lines of JSON."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self._received_bytes = connected, bytearray()
        self.longest = LONGEST_HELLO
        self._key: Key | None = None
        self._ends = b"", b""
        self._sent = self._received = 0
        connected.settimeout(TO_SEND)
        quarter = SILENT // 4  # idle for one, then three probes; USER_TIMEOUT is for data that is not acknowledged
        for level, name, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, quarter),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, quarter),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT * 1000),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ):
            connected.setsockopt(level, name, value)

    @property
    def address(self) -> str:
        """Address of this end."""
        return str(self.socket.getsockname()[0]).removeprefix("::ffff:")

    @property
    def peer(self) -> str:
        """Address of the other end."""
        with suppress(OSError):
            return str(self.socket.getpeername()[0]).removeprefix("::ffff:")
        return "?"

    def secure(self, key: Key, mine: bytes, theirs: bytes) -> None:
        """Sign all further lines. mine, theirs: HOST or GUEST."""
        self._key, self._ends = key, (mine, theirs)

    def send(self, what: str, number: int, value: Any) -> None:
        """Send a line. Raises OSError if the connection is closed."""
        text = json.dumps([what, number, value]).encode()
        if self._key is not None:
            text = self._key.sign(self._ends[0], b"%d" % self._sent, text).encode() + b" " + text
            self._sent += 1
        self.socket.sendall(text + b"\n")

    def receive(self) -> list[Line]:
        """Return the lines that have arrived; wait if there is nothing to read.

        Raises OSError if the connection is closed, ValueError if a line is not one of duoka's.
        """
        self._fill()
        return self.buffered()

    def receive_one(self) -> Line:
        """Return the next line; further ones stay buffered. Raises as `receive`."""
        while not (lines := self.buffered(most=1)):
            self._fill()
        return lines[0]

    def buffered(self, most: int | None = None) -> list[Line]:
        """Return the lines that were received already, at most so many."""
        *lines, rest = bytes(self._received_bytes).split(b"\n", -1 if most is None else most)
        self._received_bytes = bytearray(rest)
        if len(rest) > self.longest or any(len(line) > self.longest for line in lines):
            raise ValueError("a line is too long")
        return [self._parse(line) for line in lines]

    def unread(self) -> bytes:
        """Return the bytes received after the last line, for another protocol that follows."""
        return bytes(self._received_bytes)

    def _fill(self) -> None:
        try:
            received = self.socket.recv(1 << 16)
        except ConnectionResetError:  # the other end closed it before it read all that it was sent
            received = b""
        if not received:
            raise ConnectionError("its command has ended")
        self._received_bytes += received

    def _parse(self, line: bytes) -> Line:
        if self._key is not None:
            signature, _, line = line.partition(b" ")
            text = signature.decode("ascii", "replace")
            if not self._key.signed(text, self._ends[1], b"%d" % self._received, line):
                raise ValueError("a line has a wrong signature")
            self._received += 1
        try:
            what, number, value = json.loads(line)
        except RecursionError:  # of a line of brackets
            raise ValueError(NO_PROTOCOL) from None
        if not isinstance(what, str) or type(number) is not int:
            raise ValueError(NO_PROTOCOL)
        return what, number, value


def challenge(connection: Connection, key: Key) -> int:
    """Challenge the guest at the other end, prove to have the key, too, and return the guest's number.

    Raises WrongKey if the guest has another key, ValueError if it is no command of duoka, OSError if the connection
    is closed.
    """
    mine = secrets.token_hex(16)
    connection.send("challenge", 0, mine)
    what, number, value = connection.receive_one()
    if what != "answer":
        raise ValueError(NO_PROTOCOL)
    theirs, signature = value
    both = _both(mine, theirs)
    if not key.signed(signature, GUEST, *both):
        with suppress(OSError):
            connection.send("refused", 0, "key")
        raise WrongKey(f"{connection.peer} has another key")
    connection.send("proof", 0, key.sign(HOST, *both))
    connection.secure(_key_of_connection(key, both), HOST, GUEST)
    return number


def answer(connection: Connection, key: Key, number: int) -> None:
    """Answer the host's challenge, and check its proof. number: of this guest. Raises as `challenge`."""
    theirs, mine = _value_of(connection.receive_one(), "challenge"), secrets.token_hex(16)
    both = _both(theirs, mine)
    connection.send("answer", number, [mine, key.sign(GUEST, *both)])
    if not key.signed(_value_of(connection.receive_one(), "proof"), HOST, *both):
        raise WrongKey("it has another key")
    connection.secure(_key_of_connection(key, both), GUEST, HOST)


def _value_of(line: Line, what: str) -> Any:
    if line[0] == "refused":
        raise WrongKey("it has another key")
    if line[0] != what:
        raise ValueError("the program at that address is not a duoka command")
    return line[2]


def _both(host: Any, guest: Any) -> tuple[bytes, bytes]:
    if not isinstance(host, str) or not isinstance(guest, str):
        raise ValueError(NO_PROTOCOL)
    return host.encode(), guest.encode()


def _key_of_connection(key: Key, both: tuple[bytes, bytes]) -> Key:
    """Derive a key from the run's key (which may be empty) and both random numbers."""
    return Key(bytes.fromhex(key.sign(b"connection", *both)))


class Reception(Generic[T]):
    """Receives those who connect to a listener, each in a thread, so that nobody who is silent holds up the others.

    greet: authenticates the other end of a socket, which it closes if it raises an error. patience: seconds for that.
    """

    def __init__(self, listener: socket.socket, greet: Callable[[socket.socket], T], patience: float) -> None:
        self._listener, self._greet, self._patience = listener, greet, patience
        self._pool = ThreadPoolExecutor(MOST_UNKNOWN + 1)
        self._unknown: dict[socket.socket, tuple[float, Future[T]]] = {}  # oldest first, with the time of arrival

    def __enter__(self) -> Reception[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop(self._unknown)
        self._pool.shutdown()

    def __len__(self) -> int:
        return len(self._unknown)

    def poll(self) -> list[Future[T]]:
        """Accept the next connection, as long as the listener's timeout lets it; return the greetings that ended.

        Whoever takes too long is dropped, and the oldest where there are too many.
        """
        now, most = time.monotonic(), MOST_UNKNOWN
        try:
            accepted = self._listener.accept()[0]
            # A thread for each of MOST_UNKNOWN, and one more: this one is accepted before the oldest is dropped.
            self._unknown[accepted] = now, self._pool.submit(self._greet, accepted)
        except (BlockingIOError, TimeoutError):
            pass
        except OSError:  # mostly, too many files are open
            most = len(self._unknown) - 1
        ended = [self._unknown.pop(wire)[1] for wire, (_, greeting) in [*self._unknown.items()] if greeting.done()]
        self._drop([wire for wire, (since, _) in self._unknown.items() if now - since > self._patience])
        self._drop([*self._unknown][: max(0, len(self._unknown) - most)])
        return ended

    def _drop(self, wires: Iterable[socket.socket]) -> None:
        for wire in wires:
            with suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)  # which ends the greeting


class Message(NamedTuple):
    """The last message of a machine under a name."""

    value: Any
    at: float  # CLOCK_MONOTONIC when it was received here


class Channel:
    """This machine's connections: of machine 0 to each of the others, of each of these to machine 0."""

    def __init__(self, number: int, connections: Mapping[int, Connection]) -> None:
        self.number = number  # of this machine
        self.lost = dict[int, str]()  # the machines that are gone, with the reason
        self.connections = dict(connections)  # by the number of the other machine
        first = next(iter(connections.values()), None)
        self.address = "" if first is None else first.address  # of this machine, as the others see it
        self.host = first.peer if first is not None and number else self.address  # machine 0's, as this one sees it
        self._messages: dict[str, dict[int, Message]] = {}
        self._selector = selectors.EpollSelector()  # one descriptor for all, which other selectors can wait for
        self.file = self._selector.fileno()  # readable when `read` has work to do
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
            for machine in list(self.connections):  # a copy: one that cannot be written to is lost meanwhile
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


# Addresses and network interfaces of this machine, and sockets that listen there.


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
            continue  # the host's own name in /etc/hosts: others could not reach it there
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # that: of a machine that forwards the port to this one
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
