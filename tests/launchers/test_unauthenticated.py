"""Connections without the run's key: they crash nothing, end nothing and learn nothing."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from typing import Any

import pytest

from duoka.errors import TimedOut
from duoka.launchers import joining
from duoka.launchers.joining import Hello
from duoka.network.connection import GUEST, LONGEST_HELLO, Channel, Connection, WrongKey, answer, listen_on
from duoka.network.keys import Key
from duoka.planning.options import Machines

KEY = Key(b"a secret of the tests")
SECRET = "--password=hunter2"


@pytest.fixture
def place() -> Machines:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Machines(2, 0, "127.0.0.1", server.getsockname()[1])


def connect_guest(place: Machines, hello: Hello, seconds: float) -> tuple[Channel, list[Hello]]:
    return joining.connect(replace(place, number=1), KEY, hello, seconds, lambda text: None)


@pytest.fixture
def wires(place: Machines) -> Iterator[Callable[[], socket.socket]]:
    """Connections to machine 0, which waits for machine 1 meanwhile, and in the end meets it."""
    hello = Hello("node0", 2, settings={"the script's argument list": KEY.sign(b"fact", SECRET.encode())})
    found = list[Any]()
    told: list[str] = []

    def wait() -> None:
        try:
            found.extend(joining.connect(place, KEY, hello, 60.0, told.append))
        except BaseException as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with ExitStack() as stack:

        def connect() -> socket.socket:
            for _ in range(200):
                with suppress(ConnectionRefusedError):
                    return stack.enter_context(socket.create_connection((place.host, place.port), 20.0))
                threading.Event().wait(0.05)
            raise AssertionError(found)

        yield connect
        guest, met = connect_guest(place, replace(hello, name="node1"), 60.0)
        waiting.join()
        host, met_by_host = found
        assert met_by_host == met == [hello, replace(hello, name="node1")]
        guest.close()
        host.close()
    assert "\x1b" not in "".join(told)


def heard(wire: socket.socket) -> bytes:
    """All that is said to a stranger until the connection is closed."""
    said = b""
    with suppress(ConnectionResetError):
        while came := wire.recv(1 << 16):
            said += came
    assert SECRET.encode() not in said
    assert KEY.sign(b"fact", SECRET.encode()).encode() not in said
    return said


def says(what: str, number: object, value: object) -> bytes:
    return json.dumps([what, number, value]).encode() + b"\n"


HELLO = asdict(Hello("node1", 2))


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 200_000 + b"\n",
        b"[" * 60_000 + b"\n",
        b"x" * (LONGEST_HELLO + 10_000),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xfe\x00\n",
        says("hello", 1, HELLO),
        says("hello", 1, {"name": "node1", "machines": 2}),
        says("answer", 1, None),
        says("answer", 1, ["x" * 32, "0" * 64]),
        says("answer", 1, [{}, []]),
        says("answer", "one", ["x", "y"]),
        says("answer", 1, ["x", "\u00e9" * 64]),
        says("verdict", 1, {}),
        says("refused", 0, ["", "\x1b[2J"]),
        says("accepted", 0, []),
        json.dumps(["answer", 1 << 2000, ["x", "y"]]).encode() + b"\n",
        b"9" * 5_000 + b"\n",
        b"",
    ],
    ids=lambda said: repr(said[:24]),
)
def test_what_a_stranger_says(said: bytes, wires: Callable[[], socket.socket]) -> None:
    wire = wires()
    with suppress(OSError):
        wire.sendall(said)
        wire.shutdown(socket.SHUT_WR)
    challenge, *more = heard(wire).splitlines()
    assert json.loads(challenge)[0] == "challenge"
    assert [json.loads(line) for line in more] in ([], [["refused", 0, "key"]])


def test_another_key(wires: Callable[[], socket.socket]) -> None:
    with pytest.raises(WrongKey):
        answer(Connection(wires()), Key(b"another secret"), 1)
    with pytest.raises(WrongKey):
        answer(Connection(wires()), Key(), 1)


def test_an_answer_is_worth_nothing_a_second_time(wires: Callable[[], socket.socket]) -> None:
    first, second = wires(), wires()
    number = json.loads(Connection(first).socket.makefile("rb").readline())[2]
    right = says("answer", 1, ["n", KEY.sign(GUEST, number.encode(), b"n")])
    second.sendall(right)
    assert b'"refused", 0, "key"' in heard(second)
    first.sendall(right)
    assert b'"proof"' in first.recv(1 << 16)
    first.sendall(says("hello", 1, HELLO))  # after it each line is signed
    assert heard(first) == b""


def test_a_command_of_the_user_s_that_is_stale(wires: Callable[[], socket.socket]) -> None:
    """The command has the key, but other settings."""
    for hello in (Hello("old", 3), Hello("old", 2, settings={"--loading": "0"}), {"name": 1}, {}, [], None, 5):
        line = Connection(wires())
        answer(line, KEY, 1)
        line.send("hello", 1, asdict(hello) if isinstance(hello, Hello) else hello)
        with suppress(ConnectionError):
            for what, _, value in line.receive():
                assert what == "refused"
                assert SECRET not in str(value)
                assert "old" in str(value)


def test_idle_connections_are_not_kept(wires: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as want, of which the last are kept for a while."""
    monkeypatch.setattr(joining, "HELLO_TIMEOUT", 0.5)
    many = [wires() for _ in range(300)]
    for wire in many:
        assert heard(wire).startswith(b'["challenge"')


def test_it_listens_at_the_rendezvous_and_nowhere_else() -> None:
    with listen_on("127.0.0.1", 0) as one:
        assert one.getsockname()[0] == "127.0.0.1"
    with listen_on("localhost", 0) as one:
        assert one.getsockname()[0] in ("127.0.0.1", "::1")
    with listen_on("203.0.113.7", 0) as one:  # whose port is forwarded to this machine
        assert one.getsockname()[0] in ("0.0.0.0", "::")


def test_a_host_that_has_another_key_learns_nothing(place: Machines) -> None:
    """Somebody else listens where machine 0 should."""
    with socket.create_server((place.host, place.port)) as server:
        said = list[bytes]()

        def impostor() -> None:
            for proof in (
                b'["proof", 0, "%s"]\n' % (b"0" * 64),
                b'["accepted", 0, []]\n',
                b'["refused", 0, ["", "go"]]\n',
            ):
                with closing(server.accept()[0]) as wire, suppress(OSError):
                    wire.settimeout(20.0)
                    wire.sendall(b'["challenge", 0, "n"]\n')
                    said.append(wire.makefile("rb").readline())
                    wire.sendall(proof)
                    said.append(wire.recv(1 << 16))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(TimedOut, match="gave up waiting"):
            connect_guest(place, Hello("node1", 2, settings={"what": SECRET}), 3.0)
        thread.join()
    assert all(not line or json.loads(line)[0] == "answer" for line in said)
