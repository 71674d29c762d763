"""The verdict that machines reach from the results of all. Whole runs are in tests/flows/test_machines.py."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from duoka.errors import AskedError, OptionError, TimedOut
from duoka.launchers.joining import Hello, connect
from duoka.launchers.machines import FOR_FIRST, OtherMachines, agree, choose, progress_of, serialised
from duoka.launchers.verdict import Doubt, MachineResult, Verdict
from duoka.network.connection import SILENT, Channel, Connection, listen_on_all
from duoka.network.keys import Key
from duoka.planning.options import Machines
from duoka.supervision.status_board import StatusBoard

WELL, STOPPED = MachineResult("well", 0, ""), MachineResult("stopped", 143, "", Doubt.NOTHING)
RAISED, EXITED = MachineResult("raised", 1, "rank 1 raised"), MachineResult("exited", 3, "rank 2 exited")
LOST = MachineResult("raised", 1, "rank 0 raised PeerLost", Doubt.FOLLOWS)
LEFT = MachineResult("left", 1, "rank 2 left", Doubt.LEFT)
ENDED = MachineResult("elsewhere", 1, "", Doubt.NOTHING)
AGREED = MachineResult("agreed", 3, "rank 0 exited", way="exit 3")


@pytest.mark.parametrize(
    ("told", "silent", "chosen"),
    [
        ({0: WELL, 1: WELL}, [], None),
        ({0: LOST, 1: RAISED}, [], 1),
        ({1: RAISED, 0: EXITED}, [], 1),
        ({0: EXITED, 1: RAISED}, [], 0),
        ({0: LOST, 2: ENDED}, [1], 1),
        ({0: LOST, 2: RAISED}, [1], 2),
        ({0: LOST, 1: WELL}, [], 0),
        ({0: LOST, 1: LEFT}, [], 1),
        ({0: ENDED, 1: LOST}, [], 1),
    ],
)
def test_whose_word_counts(told: dict[int, MachineResult], silent: list[int], chosen: int | None) -> None:
    assert choose(told, silent) == chosen


@pytest.mark.parametrize(
    ("told", "silent", "all_agree"),
    [
        ({0: AGREED, 1: AGREED}, [], True),
        ({0: AGREED, 1: AGREED}, [2], False),
        ({0: AGREED, 1: MachineResult("agreed", 3, "", way="exit 4")}, [], False),
        ({0: AGREED, 1: ENDED}, [], False),
        ({0: WELL, 1: WELL}, [], True),
        ({0: WELL, 1: AGREED}, [], False),
    ],
)
def test_whether_the_ranks_of_all_machines_ended_alike(
    told: dict[int, MachineResult], silent: list[int], all_agree: bool
) -> None:
    assert agree(told, silent) == all_agree


@pytest.mark.parametrize(
    ("codes", "silent", "code"), [([75, 75], [], 75), ([75, 143], [], 143), ([0, 143], [], 143), ([143], [1], 143)]
)
def test_the_exit_code_of_who_was_asked_to_end(codes: list[int], silent: list[int], code: int) -> None:
    told = {machine: MachineResult("stopped", one, "") for machine, one in enumerate(codes)}
    others = OtherMachines(machines=Machines(len(codes) + len(silent), 0, "node0", 1))
    assert others._concluded(Verdict("stopped", codes[0]), told).code == code


def test_the_exit_code_is_not_that_of_a_machine_that_lost_the_others() -> None:
    lost = MachineResult("stopped", 143, "", Doubt.FOLLOWS)
    told = {0: lost, 1: MachineResult("stopped", 75, "", Doubt.NOTHING)}
    others = OtherMachines(machines=Machines(2, 0, "node0", 1))
    assert others._concluded(Verdict("stopped", 143), told).code == 75
    assert others._concluded(Verdict("stopped", 143), {0: lost, 1: lost}).code == 143


def test_how_far_a_rank_is_survives_the_way() -> None:
    board = StatusBoard.create(1, 4)
    slot = board.slot(4)
    slot.begin_collective(1, "a")
    slot.end_collective()
    slot.begin_collective(2, "all_reduce at train.py:7")
    told = progress_of(serialised(board.read(4)), received_at=1000.0)
    assert (told.begun, told.finished, told.number, told.text) == (2, 1, 2, "all_reduce at train.py:7")
    assert told.waiting
    assert 999 < told.since <= told.seen == 1000


def nobody(text: str) -> None:
    """Is told for whom a machine waits."""


@pytest.fixture
def place() -> Machines:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Machines(3, 0, "127.0.0.1", server.getsockname()[1])


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


KEY = Key(b"a secret of the tests")


def hello(number: int, count: int = 3) -> Hello:
    return Hello(f"node{number}", count)


def meeting(
    machines: Machines, seconds: float = 20.0, report_wait: Callable[[str], None] = nobody, /, **more: Any
) -> Callable[[], Any]:
    """Connect as this machine, and return its channel and the first messages."""
    first = replace(hello(machines.number, machines.count), **more)
    return lambda: connect(machines, KEY, first, seconds, report_wait)


def each(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls at the same time, and return what they return or raise."""
    found: list[Any] = [None] * len(calls)

    def make(at: int) -> None:
        try:
            found[at] = calls[at]()
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=make, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def talks(place: Machines, closing: ExitStack) -> list[Channel]:
    """Three machines that have met."""
    met = each(*(meeting(replace(place, number=number)) for number in range(3)))
    for channel, _ in met:
        closing.callback(channel.close)
    assert [hellos for _, hellos in met] == [[hello(number) for number in range(3)]] * 3
    return [channel for channel, _ in met]


def until(talks: list[Channel], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        for one in talks:
            one.read()


def test_all_hear_everything_in_the_same_order(talks: list[Channel]) -> None:
    for number in (2, 0, 1):
        talks[number].send("end", number)
    talks[1].send("end", "again")
    until(
        talks, lambda: all(len(one.messages("end")) == 3 and one.messages("end")[1].value == "again" for one in talks)
    )
    assert len({tuple(one.messages("end")) for one in talks}) == 1
    assert [one.messages("nothing") for one in talks] == [{}, {}, {}]
    assert {one.address for one in talks} == {"127.0.0.1"}


def test_what_comes_together_with_the_last_line_of_joining_is_heard(closing: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        guest = Connection(socket.create_connection(server.getsockname()))
        host = Connection(server.accept()[0])
    closing.callback(host.socket.close)
    host.send("accepted", 0, [])
    host.send("port 0", 0, 29500)
    host.socket.shutdown(socket.SHUT_WR)
    until([], lambda: len(guest.socket.recv(1 << 16, socket.MSG_PEEK).splitlines()) == 2)
    assert guest.receive_one()[0] == "accepted"
    channel = Channel(1, {0: guest})
    closing.callback(channel.close)
    assert channel.messages("port 0")[0].value == 29500


def test_messages_for_machine_0_go_to_no_other(talks: list[Channel]) -> None:
    talks[1].send(f"{FOR_FIRST}samples", [1])
    talks[1].send("progress", 2)
    until(talks, lambda: all(one.messages("progress") for one in talks))
    assert [1 in one.messages(f"{FOR_FIRST}samples") for one in talks] == [True, False, False]


def test_a_machine_that_goes_is_lost_to_all(talks: list[Channel]) -> None:
    talks[1].send("end", "before")
    talks[1].close()
    left = [talks[0], talks[2]]
    until(left, lambda: all(one.lost for one in left))
    assert [one.lost for one in left] == [{1: "its command has ended"}] * 2
    assert [one.messages("end")[1].value for one in left] == ["before"] * 2


def test_without_machine_0_nobody_is_heard(talks: list[Channel]) -> None:
    talks[0].close()
    until(talks[1:], lambda: all(one.lost for one in talks[1:]))
    talks[1].send("end", 1)
    talks[1].read()
    assert [list(one.lost) for one in talks[1:]] == [[0], [0]]
    assert talks[1].messages("end") == {}


def test_what_no_command_says_ends_its_line(talks: list[Channel]) -> None:
    for line in talks[0].connections.values():
        line.longest = 1000
    talks[1].connections[0].socket.sendall(b'["end", 1, 2]\n')  # that nobody has signed
    talks[2].connections[0].socket.sendall(b"x" * 2000)
    until(talks[:1], lambda: len(talks[0].lost) == 2)
    assert talks[0].lost[1] == "a line has a wrong signature"


def test_the_kernels_ask_each_other_whether_they_are_there(talks: list[Channel]) -> None:
    for one in talks:
        for line in one.connections.values():
            idle, interval, count = (
                line.socket.getsockopt(socket.IPPROTO_TCP, name)
                for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert line.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert SILENT - 5 < idle + interval * count <= SILENT
            assert line.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENT * 1000


def test_strangers_and_those_who_go_again_do_not_matter(place: Machines, closing: ExitStack) -> None:
    def disturb() -> Any:
        time.sleep(0.3)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b'["hello", 2, {}]\n', b'["hello", "x", 1]\n', b""):
            with socket.create_connection((place.host, place.port)) as stranger:
                stranger.sendall(said)
        with pytest.raises(TimedOut, match="machine 1 gave up waiting for machine 0: it did not answer"):
            meeting(replace(place, number=1), 0.5)()
        return meeting(replace(place, number=1))()

    def late() -> Any:
        time.sleep(1.5)
        return meeting(replace(place, number=2))()

    met = each(meeting(place), disturb, late)
    for channel, _ in met:
        closing.callback(channel.close)
    assert [hellos for _, hellos in met] == [[hello(number) for number in range(3)]] * 3


def refused(place: Machines, closing: ExitStack, **other: Any) -> list[Any]:
    """Connect a host and two members, of which the first is refused before the second comes; return the results."""
    place = replace(place, count=2)
    guest = replace(place, number=1)

    def met(machines: Machines) -> list[Hello]:
        channel, hellos = meeting(machines)()
        closing.callback(channel.close)
        return hellos

    def first_wrong() -> Any:
        with pytest.raises(AskedError) as error:
            meeting(guest, **other)()
        return error.value, None if place.engine else met(guest)

    return each(lambda: met(place), first_wrong)


def test_who_was_started_otherwise_is_refused_and_the_others_are_waited_for(
    place: Machines, closing: ExitStack
) -> None:
    both = [hello(0, 2), hello(1, 2)]
    met, (error, met_right) = refused(place, closing, machines=4)
    assert str(error) == "--machines is 2 on machine 0 (node0), but 4 on node1"
    assert met == met_right == both
    met, (error, _) = refused(place, closing, settings={"--loading": "0123"})
    assert (met, error.what, error.other) == (both, "--loading", 0)


def test_where_only_the_job_has_the_key_the_first_that_differs_ends_it(place: Machines, closing: ExitStack) -> None:
    host_error, (error, _) = refused(replace(place, engine="Slurm"), closing, settings={"--loading": "0123"})
    assert isinstance(host_error, AskedError)
    assert "--loading" in str(host_error)
    assert "--loading" in str(error)


def test_nobody_comes(place: Machines) -> None:
    told: list[str] = []
    with pytest.raises(TimedOut, match=r"machine 0 gave up waiting for machine 1 and machine 2: no connection at "):
        meeting(place, 0.1, told.append)()
    assert told[0] == f"waiting for machine 1 and machine 2 at {place.rendezvous}"
    with pytest.raises(TimedOut, match=r"machine 2 gave up waiting for machine 0: .* in 0\.7 s; Connection refused"):
        meeting(replace(place, number=2), 0.7, told.append)()
    assert told[-1] == f"waiting for machine 0 at {place.rendezvous}: Connection refused"


def test_a_port_that_is_taken(closing: ExitStack) -> None:
    server = closing.enter_context(listen_on_all(0))
    taken = "--rendezvous must be at a port that is free on machine 0, but is 'localhost:"
    with pytest.raises(OptionError, match=taken):
        meeting(Machines(2, 0, "localhost", server.getsockname()[1]), 1.0)()
