"""Collectives between ranks: the interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from duoka.collectives.streams import StreamWaits
from duoka.errors import DuokaError
from duoka.network.keys import Key, sign_object, verify_object
from duoka.private.torch import StopRecomputation
from duoka.supervision.status_board import StatusSlot

T = TypeVar("T")


class Exchange(ABC):
    """An all-gather of small CPU tensors that is faster than gloo's."""

    @abstractmethod
    def accepts(self, tensor: Tensor) -> bool:
        """Return True if this exchange can send a tensor; the result is the same on every rank."""

    @abstractmethod
    def start(self, tensor: Tensor | None, receive: Callable[[list[Tensor]], Any], text: bytes) -> Callable[[], None]:
        """Send `tensor`, and return a function that waits for the others.

        That function calls `receive` with the tensors of all ranks, flattened, in the order of ranks. It raises
        PeerFailed if any rank has sent None. text: names the collective, equal on all ranks.
        """

    def meet(self, slot: StatusSlot, digest: int, text: str) -> bool:
        """Return whether all ranks are at the same operation; True where a rank does not see what others do.

        digest: of its name; text: the name.
        """
        return True

    def reading(self, slot: StatusSlot, line: int, now: Any, expected: bool) -> Any:
        """Return rank 0's value of a clock; None if this exchange cannot tell: a collective reads it."""
        return None


COALESCE_BYTES = 1 << 22  # bytes of tensors that are broadcast in one call
AGREEMENT = "all_reduce of whether any failed"  # the collective of `Collectives.run_or_fall_back`


class IsolatedRank(Exception):
    """A collective was called by a rank that is trying something out by itself (`Collectives.isolated`)."""


class PeerFailed(BaseException):
    """The work of some rank has raised an error. Not an Exception, so that no rule catches it."""


class Collectives(ABC):
    """The collectives of a rank among `world_size` ranks. All ranks must make the same calls in the same order."""

    rank: int
    world_size: int
    begun: int = 0  # collectives so far
    key: Key = Key()  # of the run; signs objects
    isolated: bool = False  # True while this rank tries something out that the others do not: no collective then
    reads_alone: Callable[[], bool] = staticmethod(lambda: False)  # whether this thread reads what other ranks do not
    waited: int = 0  # nanoseconds in which this process waited for collectives
    stream_waits: StreamWaits | None = None  # measures the same for the stream of an accelerator
    _agreeing: bool = False  # within `run_or_fall_back`, before the first collective
    _delayed: list[Tensor] | None = None  # within `coalesced_broadcasts`

    @property
    def all_ranks(self) -> Collectives:
        """The collectives of all ranks of the run."""
        return self

    @property
    def members(self) -> Sequence[int]:
        """The ranks of the run that take part in these collectives."""
        return range(self.world_size)

    def _before_collective(self) -> None:
        """Count a collective; every subclass calls this before it communicates.

        Raises:
            IsolatedRank: this rank is trying something out by itself.
            PeerFailed: another rank failed before its first collective within `run_or_fall_back`.
        """
        if self.isolated:
            raise IsolatedRank
        if self._agreeing:
            self._agree(False)
        self.begun += 1

    def show_rows(self, rows: int, seconds: float = 0.0) -> None:  # noqa: B027 (nobody sees one rank's)
        """Show this rank's share of the largest batch. seconds: of each row, without waits; 0: as before."""

    def run_or_fall_back(self, work: Callable[[], T], fallback: Callable[[], T]) -> T:
        """Return `work()`; if it raises an error on any rank, return `fallback()` on all.

        Errors must be raised before the first collective of `work`: there, or at its end, the ranks compare.
        """
        if self._agreeing:
            return work()
        self._agreeing = True
        try:
            out = work()
            if self._agreeing:
                self._agree(False)
            return out
        except (DuokaError, StopRecomputation):  # raised on every rank
            raise
        except Exception:
            if not self._agreeing:  # the ranks have compared already
                raise
            with suppress(PeerFailed):
                self._agree(True)
        except PeerFailed:
            pass
        finally:
            self._agreeing = False
        return fallback()

    def _agree(self, failed: bool) -> None:
        """Raise PeerFailed if any rank has failed."""
        self._agreeing = False
        begun = self.begun
        number = int(self.all_reduce(torch.tensor(int(failed), device="cpu"), ReduceOp.MAX))
        self.begun = begun  # not a collective of the script's
        if number:
            raise PeerFailed

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        """Start to reduce `tensor` over all ranks, in place; the returned function waits for the result."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor`, of the same shape on all: shape (world_size, *tensor.shape)."""

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start an all-gather; the returned function waits for the result and returns it."""
        gathered = self.all_gather(tensor)
        return lambda: gathered

    def in_background(self, wait: Callable[[], T], started: int = 1) -> Callable[[], T]:
        """Take the `started` last collectives off the status board and the thread check while they go on.

        wait: waits for these. Returns the function to call instead of `wait`: it enters them again, and waits.
        """
        return wait

    def start_all_to_all(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to send row r of `tensor`, shape (world_size, ...), to rank r.

        The returned function waits for the rows from all ranks and returns them in the order of ranks.
        """
        received = self.all_gather(tensor)[:, self.rank]
        return lambda: received

    def start_reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum `tensor`, shape (world_size, n), over the ranks, row r for rank r.

        The returned function waits for this rank's sum, shape (n,).
        """
        wait = self.start_all_to_all(tensor)
        return lambda: wait().sum(0)

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite `tensor` with that of rank `source`, and return it."""

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """Reduce `tensor` over all ranks, in place, to the same bits on every rank."""
        self.start_all_reduce(tensor, op)()
        return tensor

    def is_true_anywhere(self, value: bool) -> bool:
        """Return whether a value that may differ between ranks is True on one of them."""
        return bool(self.all_reduce(torch.tensor([value], dtype=torch.int32), ReduceOp.MAX))

    def broadcast_into(self, tensor: Tensor, source: int) -> None:
        """Set `tensor`, of any layout, to the values of rank `source`; written only if they differ."""
        if tensor.layout is not torch.strided:
            received = self.broadcast_object(tensor.detach(), source)
            if self.rank != source:
                tensor.data = received
        elif self._delayed is not None and source == 0:
            self._delayed.append(tensor)
        else:
            values = self.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), source)
            _set_values(tensor, values)

    @contextmanager
    def coalesced_broadcasts(self) -> Iterator[None]:
        """Delay `broadcast_into(tensor, 0)` to the end of this context, and send small tensors together."""
        tensors: list[Tensor] = []
        self._delayed = tensors
        try:
            yield
        finally:
            self._delayed = None
        kinds: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in kinds.values():
            for group in _groups(alike):
                flat = self.broadcast(torch.cat([tensor.detach().reshape(-1) for tensor in group]), 0)
                for tensor, values in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                    _set_values(tensor, values.view(tensor.shape))

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Return rank `source`'s `value`, which must be picklable."""
        size = torch.zeros(1, dtype=torch.long, device="cpu")  # whatever the script's default device is
        data = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self.rank == source:
            data = torch.frombuffer(bytearray(sign_object(value, self.key)), dtype=torch.uint8)
            size[0] = data.numel()
        self.broadcast(size, source)
        if self.rank != source:
            data = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
        self.broadcast(data, source)
        return value if self.rank == source else verify_object(data.numpy().tobytes(), self.key)

    def meet(self, name: str) -> bool:
        """Return whether all ranks are at the operation `name` of a library, so that they may make it together.

        If this returns False on any rank, it does on all that call it. It is no collective: some ranks may call it
        and others not.
        """
        return True

    def leave(self) -> None:  # noqa: B027
        """Let no rank wait in `meet` for this one, whose script has ended."""

    def reading(self, now: Any, line: int, expected: bool) -> Any:
        """Return rank 0's reading of a clock, of which this rank's is `now`.

        line: 32 bits that name the line of code, equal on all ranks. expected: all ranks make this reading;
        otherwise this rank may be alone, and gets `now`.
        """
        if not expected:
            return now
        dtype = torch.float64 if isinstance(now, float) else torch.int64
        return self.broadcast(torch.tensor([now], dtype=dtype, device="cpu"), 0).item()

    def raised(self, error: str, line: str) -> None:  # noqa: B027
        """Note an error at a line of the script; the next collective mentions it if the ranks differ."""

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_reduce(torch.zeros(1, device="cpu"))

    def barrier_at_end(self) -> None:
        """Wait until the script has ended on every rank."""
        self.barrier()


class OneRank(Collectives):
    """The null object: collectives of one rank, which do nothing."""

    rank, world_size = 0, 1

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        """Do nothing."""
        return lambda: None

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().unsqueeze(0)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor."""
        return tensor

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Return the value."""
        return value


def _set_values(tensor: Tensor, values: Tensor) -> None:
    if not torch.equal(values, tensor):
        with torch.no_grad():
            tensor.copy_(values)


def _groups(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split a list into groups of at most COALESCE_BYTES bytes, or of a single larger tensor."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        more = tensor.numel() * tensor.itemsize
        if group and size + more > COALESCE_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += more
    if group:
        yield group
