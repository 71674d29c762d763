"""What the commands of a run's machines say to each other.

Machine 0 listens where they meet, and each of the others keeps a line to it. Whatever one says goes through machine
0 to all, the one itself included, so that all hear everything in the same order. How a line is kept to those who
have the run's key is in `duoka.wire`.

A machine is lost at once when its command ends or is killed, as its line ends then. One that loses its power or its
network is lost after `SILENT` seconds: the kernels ask each other whether they are there, however busy the commands
are.
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
from duoka.keys import Key
from duoka.launchers.hello import Differs, Hello, refusal_of
from duoka.launchers.places import find, listen
from duoka.options import Machines
from duoka.printable import printable
from duoka.wire import LONGEST, TO_SEND, Challenge, Line, WrongKey, answer

PAUSE = 0.5  # seconds between two attempts to reach machine 0
STRANGERS = 64  # connections of which it is not known whose they are
TO_GREET = 5.0  # seconds that each of them has to say who it is
LOST = "lost"

Waits = Callable[[str], None]  # told for whom or what it waits


class Said(NamedTuple):
    """What a machine has said last under a name. at: CLOCK_MONOTONIC when it was heard here."""

    value: Any
    at: float


class Talk(ABC):
    """One machine's end of the talk, once they have met.

    number: of this machine. lost: the machines that are gone, and why.
    """

    def __init__(self, machines: Machines, key: Key) -> None:
        self.machines, self.number, self.key = machines, machines.number, key
        self.lost: dict[int, str] = {}
        self._said: dict[str, dict[int, Said]] = {}
        self._selector = selectors.EpollSelector()

    @abstractmethod
    def meet(self, hello: Hello, seconds: float, waits: Waits) -> list[Hello]:
        """Wait for all machines, for so many seconds; what each says first, in their order.

        Raises:
            TimedOut: not all came.
            AskedError: they were not started to compute together.
            Differs: they were not started to do the same.
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

    @property
    @abstractmethod
    def host(self) -> str:
        """Machine 0's address, as this one reaches it."""

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


class Stranger:
    """Somebody who has connected, and of whom it is not yet known who they are."""

    def __init__(self, wire: socket.socket, key: Key) -> None:
        self.line, self.since = Line(wire), time.monotonic()
        self._challenge = Challenge(self.line, key)
        self._number = -1

    def hello(self) -> tuple[int, Hello] | None:
        """The number and the hello, when they have come from somebody who has the key.

        Raises:
            OSError: they are gone, or have not the key.
            ValueError: it is no command of duoka's.
        """
        for what, number, value in self.line.receive():
            if self.line.is_secured:
                if what != "hello" or number != self._number:
                    raise ValueError("not what a command says first")
                return number, Hello.of(value)
            if what != "answer":
                raise ValueError("not what a command says first")
            self._number = number
            self._challenge.take(value)
        return None


class Host(Talk):
    """Machine 0, where all is passed on."""

    def __init__(self, machines: Machines, key: Key) -> None:
        super().__init__(machines, key)
        self._lines: dict[int, Line] = {}
        self._strangers: list[Stranger] = []
        self._turned_away = ""

    def meet(self, hello: Hello, seconds: float, waits: Waits) -> list[Hello]:
        deadline = time.monotonic() + seconds
        met = {self.number: hello}
        try:
            with listen(self.machines) as listener:
                self._selector.register(listener, selectors.EVENT_READ)
                while missing := [number for number in range(self.machines.count) if number not in met]:
                    left = deadline - time.monotonic()
                    names = self._named(missing)
                    waits(f"waiting for {names} at {self.machines.place}{self._turned_away}")
                    if left <= 0:
                        me, where = self.machines.called(0), f"at {self.machines.place} in {seconds:g} s"
                        raise TimedOut(f"{me} waited in vain for {names}: nobody came {where}{self._turned_away}")
                    for key, _ in self._selector.select(min(left, PAUSE)):
                        if key.fileobj is listener:
                            self._let_in(listener)
                        elif isinstance(key.data, Stranger):
                            self._greet(key.data, met)
                        else:
                            self._see_gone(key.data, met)
                    self._send_away(time.monotonic() - TO_GREET)
                self._selector.unregister(listener)
            hellos = [met[number] for number in sorted(met)]
            self._pass_on("met", 0, [asdict(one) for one in hellos])
            return hellos
        except AskedError as error:
            self._pass_on("refused", 0, ["", str(error)])
            raise
        finally:
            while self._strangers:
                self._drop_stranger(self._strangers[0])

    def _named(self, missing: list[int]) -> str:
        """`machine 1 and machine 2`; not all of many."""
        named = [f"{self.machines.each} {number}" for number in missing[:8]]
        return " and ".join(named) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")

    @property
    def address(self) -> str:
        return next(iter(self._lines.values())).address

    @property
    def host(self) -> str:
        return self.address

    def _let_in(self, listener: socket.socket) -> None:
        """Take a connection; where there are too many, the one that has said nothing for longest goes."""
        try:
            wire = listener.accept()[0]
        except OSError:  # who has gone again; or this process may open no more, and somebody has to go first
            wire = None
        if wire is None or len(self._strangers) >= STRANGERS:
            self._drop_stranger(*self._strangers[:1])
        if wire is not None:
            try:
                stranger = Stranger(wire, self.key)
            except OSError:
                wire.close()
                return
            self._strangers.append(stranger)
            self._selector.register(wire, selectors.EVENT_READ, stranger)

    def _greet(self, stranger: Stranger, met: dict[int, Hello]) -> None:
        """Hear who it is; whoever is none of the run's is let go, and the others are waited for."""
        if stranger not in self._strangers:  # it had to go meanwhile
            return
        try:
            said = stranger.hello()
        except (OSError, ValueError, TypeError) as error:
            if isinstance(error, WrongKey):
                self._turned_away = f"; {printable(error)}: give all the same, by DUOKA_KEY or --key-file"
            self._drop_stranger(stranger)
            return
        if said is None:
            return
        number, hello = said
        refusal = refusal_of(number, hello, met, self.machines)
        if refusal is None:
            self._strangers.remove(stranger)
            stranger.line.longest = LONGEST
            self._lines[number], met[number] = stranger.line, hello
            self._selector.modify(stranger.line.wire, selectors.EVENT_READ, stranger.line)
            return
        differs = refusal.what if isinstance(refusal, Differs) else ""
        with suppress(OSError):
            stranger.line.send("refused", 0, [differs, str(refusal)])
        who = f"{self.machines.each} {number} ({hello.name})"
        self._turned_away = f"; {who} came and was refused: {refusal}"
        self._drop_stranger(stranger)
        if self.machines.told_by and self.key.is_given:  # only this very job has its key, so nobody else will come
            raise refusal

    def _see_gone(self, line: Line, met: dict[int, Hello]) -> None:
        """Who goes again before all are here may come another time."""
        number = self._number_of(line)
        try:
            line.receive()
        except (OSError, ValueError):
            self._drop(line)
            if number is not None:
                del self._lines[number], met[number]

    def _send_away(self, since: float) -> None:
        """Let those go that have been strangers since then."""
        for stranger in [one for one in self._strangers if one.since < since]:
            self._drop_stranger(stranger)

    def _drop_stranger(self, *strangers: Stranger) -> None:
        for stranger in strangers:
            self._strangers.remove(stranger)
            self._drop(stranger.line)

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

    def __init__(self, machines: Machines, key: Key) -> None:
        super().__init__(machines, key)
        self._line: Line | None = None

    def meet(self, hello: Hello, seconds: float, waits: Waits) -> list[Hello]:
        deadline = time.monotonic() + seconds
        why, host = "it did not answer", f"{self.machines.each} 0"
        while (left := deadline - time.monotonic()) > 0:
            waits(f"waiting for {host} at {self.machines.place}: {why}")
            try:
                return self._met(hello, deadline, min(left, TO_SEND), waits)
            except (OSError, ValueError) as error:
                why = printable(_words(error))
                time.sleep(min(left, PAUSE))
        text = (
            f"{self.machines.called(self.number)} waited in vain for {host}: nobody met it at {self.machines.place}"
        )
        raise TimedOut(f"{text} in {seconds:g} s; {why}")

    def _met(self, hello: Hello, deadline: float, seconds: float, waits: Waits) -> list[Hello]:
        line = Line(socket.create_connection(find(self.machines, seconds), seconds))
        try:
            answer(line, self.key, self.number)
            line.longest = LONGEST
            line.send("hello", self.number, asdict(hello))
            line.wire.settimeout(PAUSE)
            while time.monotonic() < deadline:
                waits(f"waiting for the other {self.machines.each}s at {self.machines.place}")
                with suppress(TimeoutError):
                    for said in line.receive():
                        self._hear(*said)
                if refused := self.heard("refused"):
                    raise self._refused(*refused[0].value)
                if met := self.heard("met"):
                    self._line = self._kept(line)
                    return [Hello.of(one) for one in met[0].value]
        finally:
            if self._line is None:
                line.wire.close()
        raise TimeoutError(f"not all {self.machines.each}s came")

    def _refused(self, what: str, text: str) -> AskedError:
        return Differs(printable(what), 0, f"{self.machines.each} 0") if what else AskedError(printable(text))

    def _kept(self, line: Line) -> Line:
        line.wire.settimeout(TO_SEND)
        self._selector.register(line.wire, selectors.EVENT_READ)
        return line

    @property
    def address(self) -> str:
        assert self._line is not None
        return self._line.address

    @property
    def host(self) -> str:
        assert self._line is not None
        return self._line.peer

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


def begin(machines: Machines, key: Key) -> Talk:
    """This machine's end. key: of the run."""
    return Host(machines, key) if machines.number == 0 else Guest(machines, key)
