"""Small CPU tensors between machines: from each rank straight to every other one.

gloo asks the other end whether it is ready before it sends, and adds up around a ring, to and fro. On a network with
a delay an all_reduce of a few numbers so takes the time of a round trip, and one of some kilobytes that of two. Here
a rank sends its tensor to all others at once, without asking, and adds up what comes from them: half a round trip.
Every rank adds in the order of ranks, so all have the same bits.

The ranks meet at the store, and show each other that they have the run's key (wire.py). Each tensor is preceded by
what its rank came to with it, so ranks that have gone apart notice it at once, with both their lines.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from duoka import environment
from duoka.errors import PeerLost, RanksApart, TimedOut
from duoka.network.connection import Challenge, Connection, answer
from duoka.network.interfaces import address_of
from duoka.network.keys import Key
from duoka.system.printable import printable
from duoka.view.collectives import Failed

MOST = 1 << 18  # bytes that a rank sends for one tensor, to all others together: more is quicker around a ring
RANKS = 64  # with more of them, connections from each to each are left to gloo
TO_MEET = 60.0  # seconds that the others may take to show who they are
STRANGERS = 64  # connections at a time of which it is not known whose they are
_BUFFER = 1 << 22  # bytes that the kernel may keep for a connection, of which it takes what it allows
_DONE = "direct of {}"  # the key under which a rank says whether it is connected with all
_HEAD = struct.Struct("!IHI")  # the number of the tensor, the length of the text, the length of the tensor

Wire = tuple[socket.socket, bytes]  # a connection, and what has come on it already


def between(store: Store, rank: int, world_size: int, timeout: float, key: Key) -> Direct | None:
    """The connections of a rank of several machines, over the network device that gloo was told to use."""
    device = environment.network_device()
    return Direct.meet(store, rank, world_size, timeout, None if device is None else address_of(device), key)


class Direct:
    """This rank's connections with all others.

    wires: by rank. timeout: seconds that an exchange may wait.
    """

    def __init__(self, rank: int, world_size: int, wires: dict[int, Wire], timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._peers = {other: _Peer(other, wire, heard) for other, (wire, heard) in wires.items()}
        self._by_file = {peer.wire.fileno(): peer for peer in self._peers.values()}
        self._poll = select.poll()
        for file in self._by_file:
            self._poll.register(file, select.POLLIN)
        self._number = 0
        itself = ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(itself()))

    @classmethod
    def meet(
        cls, store: Store, rank: int, world_size: int, timeout: float, address: str | None, key: Key
    ) -> Direct | None:
        """Connect with all ranks, each of which listens at its `address`; None where not all can.

        Raises:
            TimedOut: not all ranks came.
        """
        if world_size > RANKS:
            return None
        listener = _listen(address)
        try:
            told = _told(
                store, "place of {}", rank, world_size, "" if listener is None else _place(listener), timeout
            )

            def is_done(other: int) -> bool:
                return bool(store.check([_DONE.format(other)]))

            wires = {} if listener is None or "" in told else _connected(listener, told, rank, key, is_done)
        finally:
            if listener is not None:
                listener.close()
        complete = len(wires) == world_size - 1
        if "no" in _told(store, _DONE, rank, world_size, "yes" if complete else "no", timeout):
            for wire, _ in wires.values():
                wire.close()
            return None
        return cls(rank, world_size, wires, timeout)

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor may go this way: all ranks say the same, since they are at the same place."""
        size = tensor.numel() * tensor.itemsize
        return (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and 0 < size * (self.world_size - 1) <= MOST
        )

    def start(self, tensor: Tensor | None, take: Callable[[list[Tensor]], Any], text: bytes) -> Callable[[], None]:
        """Send `tensor`, as what this rank calls `text`; the function returned waits for those of the others.

        It hands all ranks' tensors (flat, each in memory of its own) to `take`, or raises Failed.
        """
        number = self._number = (self._number + 1) % (1 << 32)
        own = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the script's default is
        if tensor is not None:
            own = own.new_empty(tensor.numel(), dtype=tensor.dtype)
            own.copy_(tensor.detach().reshape(-1))
        data: Any = own.view(torch.uint8).numpy().data
        head = _HEAD.pack(number, len(text), len(data)) + text
        for peer in self._peers.values():
            peer.send(head, data)
            self._look_for(peer)

        def wait() -> None:
            self._until(number)
            came = {other: peer.taken(number, own, text, self.rank) for other, peer in self._peers.items()}
            if tensor is None or None in came.values():
                raise Failed
            rows: dict[int, Any] = {**came, self.rank: own}
            take([rows[rank] for rank in range(self.world_size)])

        return wait

    def _look_for(self, peer: _Peer) -> None:
        if not peer.gone:
            self._poll.modify(peer.wire, select.POLLIN | (select.POLLOUT if peer.unsent else 0))

    def _until(self, number: int) -> None:
        """Wait until every other rank's tensor of this number is here, and this rank's own are on their way."""
        deadline = time.monotonic() + self.timeout
        while missing := [peer for peer in self._peers.values() if peer.unsent or not peer.has(number)]:
            lost = next((peer for peer in missing if peer.gone), None)
            if lost is not None:
                raise PeerLost(f"rank {self.rank} lost rank {lost.rank} while it waited for it: {lost.gone}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(f"rank {self.rank} waited {self.timeout:.0f} s for rank {missing[0].rank} in vain")
            for file, _ in self._poll.poll(min(left, 60.0) * 1000):
                peer = self._by_file[file]
                peer.go_on()
                if peer.gone:
                    self._poll.unregister(file)
                else:
                    self._look_for(peer)

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            peer.wire.close()


class _Peer:
    """A connection with another rank. gone: why there is none any more; empty: there is."""

    def __init__(self, rank: int, wire: socket.socket, heard: bytes) -> None:
        self.rank, self.wire, self.gone = rank, wire, ""
        self.unsent: list[memoryview] = []
        self._heard = bytearray()
        self._came: dict[int, tuple[bytes, bytearray]] = {}
        wire.setblocking(False)
        # A rank that computes for long reads nothing meanwhile: that is no reason to give its connection up.
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._take_in(heard)

    def send(self, head: bytes, data: memoryview) -> None:
        self.unsent += [memoryview(head), data]
        self._send()

    def go_on(self) -> None:
        """Send and receive what can be at once."""
        self._send()
        with suppress(BlockingIOError):
            try:
                came = self.wire.recv(_BUFFER)
            except BlockingIOError:
                raise
            except OSError as error:
                self._leave(error.strerror or str(error))
                return
            if came:
                self._take_in(came)
            else:
                self._leave("its process has ended")

    def _leave(self, why: str) -> None:
        self.gone, self.unsent = why, []

    def _send(self) -> None:
        try:
            while self.unsent:
                sent = self.wire.sendmsg(self.unsent)
                while self.unsent and sent >= len(self.unsent[0]):
                    sent -= len(self.unsent.pop(0))
                if sent:
                    self.unsent[0] = self.unsent[0][sent:]
        except BlockingIOError:
            pass
        except OSError:  # receiving tells why, after what has come before
            self.unsent = []

    def _take_in(self, came: bytes) -> None:
        self._heard += came
        while len(self._heard) >= _HEAD.size:
            number, words, size = _HEAD.unpack_from(self._heard)
            end = _HEAD.size + words + size
            if size > MOST:
                self._leave("it sent what no rank sends")
                return
            if len(self._heard) < end:
                return
            text = bytes(self._heard[_HEAD.size : _HEAD.size + words])
            self._came[number] = text, self._heard[_HEAD.size + words : end]
            del self._heard[:end]

    def has(self, number: int) -> bool:
        """Whether the tensor of this number has come."""
        return number in self._came

    def taken(self, number: int, own: Tensor, text: bytes, rank: int) -> Tensor | None:
        """The tensor of this number, like this rank's own; None: the other rank sent none.

        Raises:
            RanksApart: the other rank came to something else with it.
        """
        theirs, data = self._came.pop(number)
        if theirs == text and not (len(data) and own.numel()):
            return None
        if theirs != text or len(data) != own.numel() * own.itemsize:
            sides = sorted([(rank, text), (self.rank, theirs)])
            both = [f"rank {of} called {printable(one.decode(errors='replace'))}" for of, one in sides]
            raise RanksApart(f"the ranks called different collectives: {', '.join(both)}")
        return torch.frombuffer(data, dtype=own.dtype)


def _let_go(direct: Direct | None) -> None:
    """In a process that a rank has forked, which is none."""
    if direct is not None:
        direct.close()


# How they meet.


def _listen(address: str | None) -> socket.socket | None:
    """A socket at this address of the machine alone, at any port; None where there can be none."""
    if address is None:
        return None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError):
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        return listener
    return None


def _place(listener: socket.socket) -> str:
    address, port = listener.getsockname()[:2]
    return f"{address} {port}"


def _told(store: Store, what: str, rank: int, world_size: int, value: str, timeout: float) -> list[str]:
    """Every rank's `value`, in the order of ranks."""
    keys = [what.format(other) for other in range(world_size)]
    store.set(keys[rank], value)
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        raise TimedOut(f"rank {rank} waited in vain to begin: not all ranks came in {timeout:g} s") from error
    return [store.get(key).decode() for key in keys]


def _connected(
    listener: socket.socket, told: list[str], rank: int, key: Key, is_done: Callable[[int], bool]
) -> dict[int, Wire]:
    """Connect with those before this rank, and wait for those behind it; those with whom it comes about.

    is_done: whether a rank connects with nobody any more.
    """
    wires: dict[int, Wire] = {}
    awaited = set(range(rank + 1, len(told)))
    deadline = time.monotonic() + TO_MEET
    listener.settimeout(0.02)
    with ThreadPoolExecutor(RANKS + STRANGERS) as pool:
        asked = {other: pool.submit(_ask, told[other], rank, key) for other in range(rank)}
        greeted: dict[socket.socket, Future[tuple[int, Wire]]] = {}
        while awaited - wires.keys() and time.monotonic() < deadline:
            try:
                came = listener.accept()[0]
            except OSError:
                if not greeted and any(is_done(other) for other in awaited - wires.keys()):
                    break
            else:
                greeted[came] = pool.submit(_greet, came, key)
            for wire in [wire for wire, one in greeted.items() if one.done()]:
                with suppress(OSError, ValueError, TypeError):
                    number, found = greeted.pop(wire).result()
                    if number in awaited - wires.keys():
                        wires[number] = found
                    else:
                        wire.close()
            if len(greeted) > STRANGERS:
                _turn_away(next(iter(greeted)))
        for wire in greeted:
            _turn_away(wire)
        for other, one_asked in asked.items():
            with suppress(OSError, ValueError):
                wires[other] = one_asked.result()
    return wires


def _turn_away(wire: socket.socket) -> None:
    """Let whoever listens to it hear nothing more."""
    with suppress(OSError):
        wire.shutdown(socket.SHUT_RDWR)


def _ask(place: str, rank: int, key: Key) -> Wire:
    """Connect with a rank, and answer its challenge."""
    host, _, port = place.rpartition(" ")
    wire = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        wire.settimeout(TO_MEET)
        wire.connect((host, int(port)))
        line = Connection(wire)
        _prepare(wire)
        answer(line, key, rank)
        return wire, line.unread()
    except BaseException:
        wire.close()
        raise


def _greet(wire: socket.socket, key: Key) -> tuple[int, Wire]:
    """Challenge whoever has connected; the rank that it is."""
    try:
        line = Connection(wire)
        _prepare(wire)
        challenge = Challenge(line, key)
        said: Iterable[tuple[str, int, Any]] = ()
        while not said:
            said = line.receive(most=1)
        what, number, value = next(iter(said))
        if what != "answer":
            raise ValueError("not what a rank says first")
        challenge.take(value)
        return number, (wire, line.unread())
    except BaseException:
        wire.close()
        raise


def _prepare(wire: socket.socket) -> None:
    wire.settimeout(TO_MEET)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
