"""One connection between two processes of a run: lines of JSON, and how each end shows that it has the run's key.

    host   ["challenge", 0, N]                       N, M: random numbers, used once
    guest  ["answer", 1, [M, HMAC(key, guest N M)]]
    host   ["proof", 0, HMAC(key, host N M)]         from here on each line begins with its HMAC, under a key of the
    guest  ["hello", 1, {...}]                       connection's own

So whoever has not the key hears a random number and that it is not the one, and is heard no further. What is said is
JSON: reading it runs no code.
"""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import suppress
from typing import Any

from duoka.keys import Key

SILENT = 30  # seconds
TO_SEND = 5.0  # seconds that a line of some hundred bytes may take to be on its way
LONGEST = 1 << 22  # bytes of one line: who sends more is no command of duoka's
LONGEST_HELLO = 1 << 16  # the same of who is not yet a part of the run
HOST, GUEST = b"host", b"guest"


class WrongKey(ConnectionError):
    """The other end has not the key that this one has."""


class Line:
    """A connection on which lines of JSON come and go, each of three things: what, a number, a value.

    The number says whose it is: a machine's, or a rank's.
    """

    def __init__(self, wire: socket.socket) -> None:
        self.wire, self._heard = wire, bytearray()
        self.longest = LONGEST_HELLO
        self._key: Key | None = None
        self._ends = b"", b""
        self._sent = self._received = 0
        wire.settimeout(TO_SEND)
        quarter = SILENT // 4
        for level, name, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, quarter),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, quarter),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT * 1000),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ):
            wire.setsockopt(level, name, value)

    @property
    def address(self) -> str:
        """This end's."""
        return str(self.wire.getsockname()[0]).removeprefix("::ffff:")

    @property
    def peer(self) -> str:
        """The other end's address."""
        with suppress(OSError):
            return str(self.wire.getpeername()[0]).removeprefix("::ffff:")
        return "?"

    @property
    def is_secured(self) -> bool:
        """Whether both ends have shown that they have the key."""
        return self._key is not None

    def secure(self, key: Key, mine: bytes, theirs: bytes) -> None:
        """From here on each line is signed. mine, theirs: HOST or GUEST."""
        self._key, self._ends = key, (mine, theirs)

    def send(self, what: str, number: int, value: Any) -> None:
        """Raises OSError where the connection is no more."""
        text = json.dumps([what, number, value]).encode()
        if self._key is not None:
            text = self._key.sign(self._ends[0], b"%d" % self._sent, text).encode() + b" " + text
            self._sent += 1
        self.wire.sendall(text + b"\n")

    def receive(self, most: int | None = None) -> list[tuple[str, int, Any]]:
        """What has come, when something has. most: lines; what follows them is kept for the next time.

        Raises:
            OSError: the connection is no more.
            ValueError: no command of duoka's sends this.
        """
        if most is None or b"\n" not in self._heard:
            came = self.wire.recv(1 << 16)
            if not came:
                raise ConnectionError("its command has ended")
            self._heard += came
        *lines, rest = bytes(self._heard).split(b"\n")
        if most is not None and len(lines) > most:
            lines, rest = lines[:most], b"\n".join((*lines[most:], rest))
        self._heard = bytearray(rest)
        if len(rest) > self.longest or any(len(line) > self.longest for line in lines):
            raise ValueError("a line without an end")
        return [self._read(line) for line in lines]

    def unread(self) -> bytes:
        """What has come behind the last line: of who talks otherwise from there on."""
        return bytes(self._heard)

    def _read(self, line: bytes) -> tuple[str, int, Any]:
        if self._key is not None:
            signature, _, line = line.partition(b" ")
            if not self._key.signed(
                signature.decode("ascii", "replace"), self._ends[1], b"%d" % self._received, line
            ):
                raise ValueError("a line that nobody has signed")
            self._received += 1
        try:
            what, number, value = json.loads(line)
        except RecursionError:
            raise ValueError("not what is said here") from None
        if not isinstance(what, str) or type(number) is not int:
            raise ValueError("not what is said here")
        return what, number, value


class Challenge:
    """The host's end of a connection with somebody of whom it is not known whether they have the key."""

    def __init__(self, line: Line, key: Key) -> None:
        self._line, self._key, self._number = line, key, secrets.token_hex(16)
        line.send("challenge", 0, self._number)

    def take(self, answer: Any) -> None:
        """Take the answer to the challenge, and prove in turn to have the key.

        Raises:
            WrongKey: the other end has not.
            ValueError: it is no answer.
            OSError: the connection is no more.
        """
        number, signature = answer
        both = _both(self._number, number)
        if not self._key.signed(signature, GUEST, *both):
            with suppress(OSError):
                self._line.send("refused", 0, "key")
            raise WrongKey(f"{self._line.peer} has another key")
        self._line.send("proof", 0, self._key.sign(HOST, *both))
        self._line.secure(_own(self._key, both), HOST, GUEST)


def answer(line: Line, key: Key, number: int) -> None:
    """Answer the host's challenge, as the guest, and see that the host has the key, too. number: the guest's.

    Raises:
        WrongKey: it has not.
        ValueError: there is no command of duoka's.
        OSError: the connection is no more.
    """
    challenge, mine = _next(line, "challenge"), secrets.token_hex(16)
    both = _both(challenge, mine)
    line.send("answer", number, [mine, key.sign(GUEST, *both)])
    if not key.signed(_next(line, "proof"), HOST, *both):
        raise WrongKey("it has another key")
    line.secure(_own(key, both), GUEST, HOST)


def _next(line: Line, what: str) -> Any:
    said: list[tuple[str, int, Any]] = []
    while not said:
        said = line.receive(most=1)
    if said[0][0] == "refused":
        raise WrongKey("it has another key")
    if said[0][0] != what:
        raise ValueError("nobody of duoka's is there")
    return said[0][2]


def _both(host: Any, guest: Any) -> tuple[bytes, bytes]:
    if not isinstance(host, str) or not isinstance(guest, str):
        raise ValueError("not what is said here")
    return host.encode(), guest.encode()


def _own(key: Key, both: tuple[bytes, bytes]) -> Key:
    """The connection's own key; where there is none, lines are numbered and summed up all the same."""
    return Key(bytes.fromhex(key.sign(b"connection", *both)))
