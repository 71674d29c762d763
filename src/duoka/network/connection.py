"""An authenticated TCP connection between two processes of a run, for lines of JSON.

    host   ["challenge", 0, N]                       N, M: random numbers, used once
    guest  ["answer", 1, [M, HMAC(key, guest N M)]]
    host   ["proof", 0, HMAC(key, host N M)]         from here on each line begins with its HMAC, under a key of the
    guest  ["hello", 1, {...}]                       connection's own

An end without the key receives a random number and a refusal, and nothing that it sends is used. Parsing JSON
executes no code.
"""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import suppress
from typing import Any

from duoka.network.keys import Key

SILENT = 30  # seconds
TO_SEND = 5.0  # seconds to send a line
LONGEST = 1 << 22  # bytes of one line
LONGEST_HELLO = 1 << 16  # the same before authentication
HOST, GUEST = b"host", b"guest"


class WrongKey(ConnectionError):
    """The other end has another key."""


class Connection:
    """A connection for lines of JSON, each with three parts: name, number, value.

    The number is that of the sending machine or rank.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self._received_bytes = connected, bytearray()
        self.longest = LONGEST_HELLO
        self._key: Key | None = None
        self._ends = b"", b""
        self._sent = self._received = 0
        connected.settimeout(TO_SEND)
        quarter = SILENT // 4
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

    @property
    def is_secured(self) -> bool:
        """Return whether both ends have proved that they have the key."""
        return self._key is not None

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

    def receive(self, most: int | None = None) -> list[tuple[str, int, Any]]:
        """Return the lines that have arrived; wait if there are none.

        most: number of lines; further ones are kept for the next call.

        Raises:
            OSError: the connection is closed.
            ValueError: a line is not one of duoka's.
        """
        if most is None or b"\n" not in self._received_bytes:
            try:
                came = self.socket.recv(1 << 16)
            except ConnectionResetError:  # it ended before it read all that it was sent
                came = b""
            if not came:
                raise ConnectionError("its command has ended")
            self._received_bytes += came
        *lines, rest = bytes(self._received_bytes).split(b"\n")
        if most is not None and len(lines) > most:
            lines, rest = lines[:most], b"\n".join((*lines[most:], rest))
        self._received_bytes = bytearray(rest)
        if len(rest) > self.longest or any(len(line) > self.longest for line in lines):
            raise ValueError("a line is too long")
        return [self._read(line) for line in lines]

    def unread(self) -> bytes:
        """Return the bytes received after the last line, for another protocol that follows."""
        return bytes(self._received_bytes)

    def _read(self, line: bytes) -> tuple[str, int, Any]:
        if self._key is not None:
            signature, _, line = line.partition(b" ")
            if not self._key.signed(
                signature.decode("ascii", "replace"), self._ends[1], b"%d" % self._received, line
            ):
                raise ValueError("a line has a wrong signature")
            self._received += 1
        try:
            what, number, value = json.loads(line)
        except RecursionError:
            raise ValueError("received a message that is not part of duoka's protocol") from None
        if not isinstance(what, str) or type(number) is not int:
            raise ValueError("received a message that is not part of duoka's protocol")
        return what, number, value


class Challenge:
    """The host's side of the authentication of a connection."""

    def __init__(self, line: Connection, key: Key) -> None:
        self._line, self._key, self._number = line, key, secrets.token_hex(16)
        line.send("challenge", 0, self._number)

    def take(self, answer: Any) -> None:
        """Check the answer to the challenge, and send the host's proof.

        Raises:
            WrongKey: the other end has another key.
            ValueError: it is not an answer.
            OSError: the connection is closed.
        """
        number, signature = answer
        both = _both(self._number, number)
        if not self._key.signed(signature, GUEST, *both):
            with suppress(OSError):
                self._line.send("refused", 0, "key")
            raise WrongKey(f"{self._line.peer} has another key")
        self._line.send("proof", 0, self._key.sign(HOST, *both))
        self._line.secure(_own(self._key, both), HOST, GUEST)


def answer(line: Connection, key: Key, number: int) -> None:
    """Answer the host's challenge, and check the host's proof. number: of this guest.

    Raises:
        WrongKey: the host has another key.
        ValueError: the other end is no command of duoka.
        OSError: the connection is closed.
    """
    challenge, mine = _next(line, "challenge"), secrets.token_hex(16)
    both = _both(challenge, mine)
    line.send("answer", number, [mine, key.sign(GUEST, *both)])
    if not key.signed(_next(line, "proof"), HOST, *both):
        raise WrongKey("it has another key")
    line.secure(_own(key, both), GUEST, HOST)


def _next(line: Connection, what: str) -> Any:
    said: list[tuple[str, int, Any]] = []
    while not said:
        said = line.receive(most=1)
    if said[0][0] == "refused":
        raise WrongKey("it has another key")
    if said[0][0] != what:
        raise ValueError("the program at that address is not a duoka command")
    return said[0][2]


def _both(host: Any, guest: Any) -> tuple[bytes, bytes]:
    if not isinstance(host, str) or not isinstance(guest, str):
        raise ValueError("received a message that is not part of duoka's protocol")
    return host.encode(), guest.encode()


def _own(key: Key, both: tuple[bytes, bytes]) -> Key:
    """Derive the key of one connection from the run's key (which may be empty) and both random numbers."""
    return Key(bytes.fromhex(key.sign(b"connection", *both)))
