"""All-gather of small CPU tensors between machines: each rank sends straight to every other one.

gloo asks the receiver whether it is ready before it sends, and reduces around a ring, forth and back. On a network
with latency, its all-reduce of a few numbers takes one round trip, and of some kilobytes two. Here each rank sends
its tensor to all others at once and reduces what it receives, in the order of ranks, which takes half a round trip
and gives the same bits on all ranks.

Each tensor is preceded by the name of its collective, so ranks that call different collectives notice it at once.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from duoka.collectives.base import Exchange, PeerFailed
from duoka.collectives.connecting import BUFFER, Wire, address_of_listener, connect_all, gather_texts, listen
from duoka.errors import PeerLost, RanksApart, TimedOut
from duoka.network.connection import address_of
from duoka.network.keys import Key
from duoka.system import environment
from duoka.system.messages import printable

MOST = 1 << 18  # bytes that a rank sends for one tensor, to all others together; a ring is faster for more
RANKS = 64  # gloo is used with more ranks, as each would need a connection to each
_DONE = "direct of {}"  # the store's key for whether a rank is connected to all others
_HEAD = struct.Struct("!IHI")  # the number of the tensor, the length of the name, the length of the tensor


def between(store: Store, rank: int, world_size: int, timeout: float, key: Key) -> DirectExchange | None:
    """Connect all ranks over the network interface that gloo uses; None if not all can be connected.

    Raises:
        TimedOut: not all ranks came.
    """
    device = environment.variable("GLOO_SOCKET_IFNAME")
    address = None if device is None else address_of(device)
    return DirectExchange.connect(store, rank, world_size, timeout, address, key)


class DirectExchange(Exchange):
    """The connections of this rank to all others. timeout: of an exchange, in seconds."""

    def __init__(self, rank: int, world_size: int, wires: dict[int, Wire], timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self._peers = {other: _Peer(other, wire, received) for other, (wire, received) in wires.items()}
        self._by_file = {peer.wire.fileno(): peer for peer in self._peers.values()}
        self._poll = select.poll()
        for file in self._by_file:
            self._poll.register(file, select.POLLIN)
        self._number = 0
        itself = ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(itself()))

    @classmethod
    def connect(
        cls, store: Store, rank: int, world_size: int, timeout: float, address: str | None, key: Key
    ) -> DirectExchange | None:
        """Connect to all ranks, of which each listens at its `address`; None if not all can be connected.

        Raises:
            TimedOut: not all ranks came.
        """
        if world_size > RANKS:
            return None
        listener = listen(address)
        try:
            address = "" if listener is None else address_of_listener(listener)
            addresses = gather_texts(store, "place of {}", rank, world_size, address, timeout)

            def is_done(other: int) -> bool:
                return bool(store.check([_DONE.format(other)]))

            wires = (
                {} if listener is None or "" in addresses else connect_all(listener, addresses, rank, key, is_done)
            )
        finally:
            if listener is not None:
                listener.close()
        complete = len(wires) == world_size - 1
        if "no" in gather_texts(store, _DONE, rank, world_size, "yes" if complete else "no", timeout):
            for wire, _ in wires.values():
                wire.close()
            return None
        return cls(rank, world_size, wires, timeout)

    def accepts(self, tensor: Tensor) -> bool:
        """Return True if a tensor is small enough: equal on all ranks."""
        size = tensor.numel() * tensor.itemsize
        return (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and 0 < size * (self.world_size - 1) <= MOST
        )

    def start(self, tensor: Tensor | None, receive: Callable[[list[Tensor]], Any], text: bytes) -> Callable[[], None]:
        """Send `tensor`, and return a function that waits for the others and calls `receive` with all ranks' tensors.

        These are flattened and not shared. The function raises PeerFailed if any rank sent None. text: the name of
        the collective.
        """
        number = self._number = (self._number + 1) % (1 << 32)
        sent = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the script's default is
        if tensor is not None:
            sent = sent.new_empty(tensor.numel(), dtype=tensor.dtype)
            sent.copy_(tensor.detach().reshape(-1))
        data: Any = sent.view(torch.uint8).numpy().data
        head = _HEAD.pack(number, len(text), len(data)) + text
        for peer in self._peers.values():
            peer.send(head, data)
            self._poll_for(peer)

        def wait() -> None:
            self._until(number)
            arrived = {other: peer.pop(number, sent, text, self.rank) for other, peer in self._peers.items()}
            if tensor is None or None in arrived.values():
                raise PeerFailed
            rows: dict[int, Any] = {**arrived, self.rank: sent}
            receive([rows[rank] for rank in range(self.world_size)])

        return wait

    def _poll_for(self, peer: _Peer) -> None:
        if not peer.gone:
            self._poll.modify(peer.wire, select.POLLIN | (select.POLLOUT if peer.unsent else 0))

    def _until(self, number: int) -> None:
        """Wait until the tensors of this number have arrived from all ranks, and this rank's are sent.

        Raises:
            PeerLost: a connection was lost.
            TimedOut: a rank did not answer.
        """
        deadline = time.monotonic() + self.timeout
        while missing := [peer for peer in self._peers.values() if peer.unsent or not peer.has(number)]:
            lost = next((peer for peer in missing if peer.gone), None)
            if lost is not None:
                raise PeerLost(f"rank {self.rank} lost rank {lost.rank} while it waited for it: {lost.gone}")
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(f"rank {self.rank} waited {self.timeout:.0f} s for rank {missing[0].rank}")
            for file, _ in self._poll.poll(min(left, 60.0) * 1000):
                peer = self._by_file[file]
                peer.proceed()
                if peer.gone:
                    self._poll.unregister(file)
                else:
                    self._poll_for(peer)

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            peer.wire.close()


class _Peer:
    """The connection to another rank. gone: the reason why it was closed; empty while it is open."""

    def __init__(self, rank: int, wire: socket.socket, received: bytes) -> None:
        self.rank, self.wire, self.gone = rank, wire, ""
        self.unsent: list[memoryview] = []
        self._received = bytearray()
        self._arrived: dict[int, tuple[bytes, bytearray]] = {}
        wire.setblocking(False)
        # A rank that computes for a long time does not read meanwhile; the kernel must not close its connection.
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._parse(received)

    def send(self, head: bytes, data: memoryview) -> None:
        self.unsent += [memoryview(head), data]
        self._send()

    def proceed(self) -> None:
        """Send and receive as much as possible without waiting."""
        self._send()
        with suppress(BlockingIOError):
            try:
                came = self.wire.recv(BUFFER)
            except BlockingIOError:
                raise
            except OSError as error:
                self._close(error.strerror or str(error))
                return
            if came:
                self._parse(came)
            else:
                self._close("its process has ended")

    def _close(self, why: str) -> None:
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
        except OSError:  # recv reports the reason, after the data that came before
            self.unsent = []

    def _parse(self, came: bytes) -> None:
        self._received += came
        while len(self._received) >= _HEAD.size:
            number, words, size = _HEAD.unpack_from(self._received)
            end = _HEAD.size + words + size
            if size > MOST:
                self._close("it sent more than a rank may send")
                return
            if len(self._received) < end:
                return
            text = bytes(self._received[_HEAD.size : _HEAD.size + words])
            self._arrived[number] = text, self._received[_HEAD.size + words : end]
            del self._received[:end]

    def has(self, number: int) -> bool:
        """Return True if the tensor of this number has arrived."""
        return number in self._arrived

    def pop(self, number: int, sent: Tensor, text: bytes, rank: int) -> Tensor | None:
        """Return and remove the tensor of this number, of the type of `sent`; None if the other rank sent None.

        Raises:
            RanksApart: the other rank called another collective.
        """
        theirs, data = self._arrived.pop(number)
        if theirs == text and not (len(data) and sent.numel()):
            return None
        if theirs != text or len(data) != sent.numel() * sent.itemsize:
            sides = sorted([(rank, text), (self.rank, theirs)])
            both = [f"rank {of} called {printable(text.decode(errors='replace'))}" for of, text in sides]
            raise RanksApart(f"the ranks called different collectives: {', '.join(both)}")
        return torch.frombuffer(data, dtype=sent.dtype)


def _close_in_child(direct: DirectExchange | None) -> None:
    """Close the connections in a process that a rank has forked."""
    if direct is not None:
        direct.close()
