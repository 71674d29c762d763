"""What the commands of a run's machines say to each other.

Machine 0 listens where they meet, and each of the others keeps a line to it. Whatever one says goes through machine
0 to all, the one itself included, so that all hear everything in the same order. What is said is JSON: reading it
runs no code.

A machine is lost at once when its command ends or is killed, as its line ends then. One that loses its power or its
network is lost after `SILENT` seconds: the kernels ask each other whether they are there, however busy the commands
are.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from duoka.errors import AskedError, OptionError, TimedOut
from duoka.options import Machines

SILENT = 30  # seconds
TO_SEND = 5.0  # seconds that a line of some hundred bytes may take to be on its way
LONGEST = 1 << 22  # bytes of one line: who sends more is no command of duoka's
PAUSE = 0.5  # seconds between two attempts to reach machine 0
LOST = "lost"

Hello = dict[str, Any]  # what a command says first; its "name" is the host's
Waits = Callable[[str], None]  # told for whom or what it waits


class Said(NamedTuple):
    """What a machine has said last under a name. at: CLOCK_MONOTONIC when it was heard here."""

    value: Any
    at: float


class Talk(ABC):
    """One machine's end of the talk, once they have met.

    number: of this machine. lost: the machines that are gone, and why.
    """

    def __init__(self, machines: Machines) -> None:
        self.machines, self.number = machines, machines.number
        self.lost: dict[int, str] = {}
        self._said: dict[str, dict[int, Said]] = {}
        self._selector = selectors.EpollSelector()

    @abstractmethod
    def meet(self, hello: Hello, seconds: float, waits: Waits) -> list[Hello]:
        """Wait for all machines, for so many seconds; what each says first, in their order.

        Raises:
            TimedOut: not all came.
            AskedError: they were not started to compute together.
            OptionError: machine 0 cannot listen there.
        """

    @abstractmethod
    def say(self, what: str, value: Any) -> None:
        """Tell all machines."""

    @abstractmethod
    def read(self) -> None:
        """Take in what has arrived; waits for nothing."""

    @property
    @abstractmethod
    def address(self) -> str:
        """This machine's, as the others see it."""

    def heard(self, what: str) -> Mapping[int, Said]:
        """What machines have said under this name, in the order in which all heard it."""
        return self._said.get(what, {})

    @property
    def file(self) -> int:
        """Readable when `read` has something to do."""
        return self._selector.fileno()

    @abstractmethod
    def lines(self) -> list[Line]:
        """The connections."""

    def let_go(self) -> None:
        """Close what is open; in a worker, where the command's own lines stay open."""
        for line in self.lines():
            line.wire.close()
        self._selector.close()

    def close(self) -> None:
        """End the talk."""
        for line in self.lines():
            with suppress(OSError):
                line.wire.shutdown(socket.SHUT_WR)  # what a loader of a worker still holds open, too
        self.let_go()

    def _hear(self, what: str, number: int, value: Any) -> None:
        if what == LOST:
            self.lost.setdefault(number, value)
        else:
            self._said.setdefault(what, {})[number] = Said(value, time.monotonic())


class Line:
    """A connection on which lines of JSON come and go, each of three things: what, a machine's number, a value."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire, self._heard = wire, bytearray()
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

    def send(self, what: str, number: int, value: Any) -> None:
        """Raises OSError where the connection is no more."""
        self.wire.sendall(json.dumps([what, number, value]).encode() + b"\n")

    def receive(self) -> list[tuple[str, int, Any]]:
        """What has come, when something has.

        Raises:
            OSError: the connection is no more.
            ValueError: no command of duoka's sends this.
        """
        came = self.wire.recv(1 << 16)
        if not came:
            raise ConnectionError("its command has ended")
        self._heard += came
        *lines, rest = bytes(self._heard).split(b"\n")
        self._heard = bytearray(rest)
        if len(rest) > LONGEST:
            raise ValueError("a line without an end")
        return [self._read(line) for line in lines]

    @staticmethod
    def _read(line: bytes) -> tuple[str, int, Any]:
        what, number, value = json.loads(line)
        if not isinstance(what, str) or not isinstance(number, int):
            raise ValueError("not what a command says")
        return what, number, value


class Host(Talk):
    """Machine 0, where all is passed on."""

    def __init__(self, machines: Machines) -> None:
        super().__init__(machines)
        self._lines: dict[int, Line] = {}

    def meet(self, hello: Hello, seconds: float, waits: Waits) -> list[Hello]:
        deadline = time.monotonic() + seconds
        met = {self.number: hello}
        strangers: list[Line] = []
        try:
            with listen(self.machines) as listener:
                self._selector.register(listener, selectors.EVENT_READ)
                while missing := [number for number in range(self.machines.count) if number not in met]:
                    left = deadline - time.monotonic()
                    names = " and ".join(f"machine {number}" for number in missing)
                    waits(f"waiting for {names} at {self.machines.place}")
                    if left <= 0:
                        where = f"at {self.machines.place} in {seconds:g} s"
                        raise TimedOut(f"machine 0 waited in vain for {names}: nobody came {where}")
                    for key, _ in self._selector.select(min(left, PAUSE)):
                        if key.fileobj is listener:
                            with suppress(OSError):  # who has gone again
                                strangers.append(Line(listener.accept()[0]))
                                self._selector.register(strangers[-1].wire, selectors.EVENT_READ, strangers[-1])
                        else:
                            self._greet(key.data, met)
                self._selector.unregister(listener)
            hellos = [met[number] for number in sorted(met)]
            self._pass_on("met", 0, hellos)
            return hellos
        except AskedError as error:
            self._pass_on("refused", 0, str(error))
            raise
        finally:
            for line in strangers:
                if self._number_of(line) is None:
                    self._drop(line)

    @property
    def address(self) -> str:
        return next(iter(self._lines.values())).address

    def _greet(self, line: Line, met: dict[int, Hello]) -> None:
        """Take in who has come; who goes again before all are here may come another time."""
        number = self._number_of(line)
        try:
            for what, said, hello in line.receive():
                if what == "hello" and number is None:
                    self._lines[said] = self._admitted(said, line, hello, met)
                    met[said] = hello
        except (OSError, ValueError, TypeError, KeyError):
            self._drop(line)
            if number is not None:
                del self._lines[number], met[number]

    def _admitted(self, number: int, line: Line, hello: Hello, met: dict[int, Hello]) -> Line:
        """The line, if it is one of the run's.

        Raises:
            AskedError: it is not.
        """
        here, count = met[0]["name"], self.machines.count
        text = ""
        if not 0 < number < max(count, hello["machines"]):
            raise ValueError("no number of a machine")
        if hello["machines"] != count:
            text = f"--machines is {count} on machine 0 ({here}), but {hello['machines']} on {hello['name']}"
        elif number in met:
            text = f"--machine {number} was given on two machines: {met[number]['name']} and {hello['name']}"
        if not text:
            return line
        with suppress(OSError):
            line.send("refused", 0, text)
        raise AskedError(text)

    def say(self, what: str, value: Any) -> None:
        self._pass_on(what, self.number, value)

    def read(self) -> None:
        for key, _ in self._selector.select(0):
            number = self._number_of(key.data)
            if number is None:  # lost meanwhile
                continue
            try:
                for what, _, value in key.data.receive():
                    self._pass_on(what, number, value)
            except (OSError, ValueError) as error:
                self._lose(number, _words(error))

    def lines(self) -> list[Line]:
        return list(self._lines.values())

    def _number_of(self, line: Line) -> int | None:
        return next((number for number, one in self._lines.items() if one is line), None)

    def _pass_on(self, what: str, number: int, value: Any) -> None:
        self._hear(what, number, value)
        for other, line in list(self._lines.items()):
            try:
                line.send(what, number, value)
            except OSError as error:
                self._lose(other, _words(error))

    def _lose(self, number: int, why: str) -> None:
        if (line := self._lines.pop(number, None)) is not None:
            self._drop(line)
            self._pass_on(LOST, number, why)

    def _drop(self, line: Line) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(line.wire)
        line.wire.close()


class Guest(Talk):
    """Any other machine."""

    def __init__(self, machines: Machines) -> None:
        super().__init__(machines)
        self._line: Line | None = None

    def meet(self, hello: Hello, seconds: float, waits: Waits) -> list[Hello]:
        deadline = time.monotonic() + seconds
        why = "it did not answer"
        while (left := deadline - time.monotonic()) > 0:
            waits(f"waiting for machine 0 at {self.machines.place}: {why}")
            try:
                return self._met(hello, deadline, min(left, TO_SEND), waits)
            except (OSError, ValueError) as error:
                why = _words(error)
                time.sleep(min(left, PAUSE))
        text = f"machine {self.number} waited in vain for machine 0: nobody met it at {self.machines.place}"
        raise TimedOut(f"{text} in {seconds:g} s; {why}")

    def _met(self, hello: Hello, deadline: float, seconds: float, waits: Waits) -> list[Hello]:
        line = Line(socket.create_connection((self.machines.host, self.machines.port), seconds))
        try:
            line.send("hello", self.number, hello)
            line.wire.settimeout(PAUSE)
            while time.monotonic() < deadline:
                waits(f"waiting for the other machines at {self.machines.place}")
                with suppress(TimeoutError):
                    for said in line.receive():
                        self._hear(*said)
                if refused := self.heard("refused"):
                    raise AskedError(refused[0].value)
                if met := self.heard("met"):
                    self._line = self._kept(line)
                    return list(met[0].value)
        finally:
            if self._line is None:
                line.wire.close()
        raise TimeoutError("not all machines came")

    def _kept(self, line: Line) -> Line:
        line.wire.settimeout(TO_SEND)
        self._selector.register(line.wire, selectors.EVENT_READ)
        return line

    @property
    def address(self) -> str:
        assert self._line is not None
        return self._line.address

    def say(self, what: str, value: Any) -> None:
        if self._line is not None:
            try:
                self._line.send(what, self.number, value)
            except OSError as error:
                self._lose(_words(error))

    def read(self) -> None:
        while self._line is not None and self._selector.select(0):
            try:
                for what, number, value in self._line.receive():
                    self._hear(what, number, value)
            except (OSError, ValueError) as error:
                self._lose(_words(error))

    def lines(self) -> list[Line]:
        return [] if self._line is None else [self._line]

    def _lose(self, why: str) -> None:
        assert self._line is not None
        self._selector.unregister(self._line.wire)
        self._line.wire.close()
        self._line = None
        self._hear(LOST, 0, why)


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def listen(machines: Machines) -> socket.socket:
    """A socket at the place where they meet, open to all networks of this machine.

    Raises:
        OptionError: the port is taken.
    """
    try:
        return open_to_all(machines.port)
    except OSError as error:
        raise OptionError("--meet", machines.place, "at a port that is free on machine 0", str(error)) from None


def open_to_all(port: int) -> socket.socket:
    """A listening socket at a port (0: any) of all networks of this machine."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def begin(machines: Machines) -> Talk:
    """This machine's end."""
    return Host(machines) if machines.number == 0 else Guest(machines)
