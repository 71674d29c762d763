"""Operations between ranks."""

from __future__ import annotations

import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp, Store  # type: ignore[attr-defined]

from duoka.errors import DuokaError, PeerLost, Refused, TimedOut
from duoka.network.keys import Key
from duoka.network.signing import sign_object, verify_object
from duoka.private.texts import TOO_LATE, says
from duoka.private.torch import nccl_options, start_all_gather, without_gloo_messages
from duoka.supervision.status_board import AT_END
from duoka.view.site import user_line

T = TypeVar("T")


class CollectiveSlot(Protocol):
    """Where a rank writes which collective it is in (`duoka.supervision.status_board.StatusSlot`)."""

    def begin_collective(self, digest: int, text: str) -> None:
        """This rank comes to its next collective."""

    def end_collective(self, waited: int) -> None:
        """It has finished; raises RanksApart where other ranks came to another one. waited: nanoseconds."""


class Exchange(Protocol):
    """A way for small CPU tensors that is quicker than gloo's: through shared memory, or straight to each rank."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor may go this way: all ranks say the same, since they are at the same place."""

    def start(self, tensor: Tensor | None, take: Callable[[list[Tensor]], Any], text: bytes) -> Callable[[], None]:
        """Send `tensor`; the function returned waits for the others, and hands all ranks' (flat) to `take`.

        It raises Failed where any rank has sent None in place of its tensor. text: what this rank came to with it,
        the same on all.
        """


MAY_FAIL = "all_reduce of whether any failed"  # a collective in which the ranks learn it


class Alone(Exception):
    """A collective was called by a rank that is finding something out by itself."""


class Failed(BaseException):
    """The work of some rank has raised an error. No Exception: a rule that catches these lets it pass."""


class Collectives(ABC):
    """A rank among `world_size` ranks. Every call is made by all ranks, in the same order."""

    rank: int
    world_size: int
    begun: int = 0  # collectives so far
    key: Key = Key()  # of the run, under which objects are sign_object
    alone: bool = False  # one rank finds something out for all: it must not meet the others meanwhile
    _agreeing: bool = False  # within `agreed`, and nobody has met yet

    def begin(self) -> None:
        """A collective begins: every subclass calls this before it meets the others."""
        if self.alone:
            raise Alone
        if self._agreeing:
            self._agree(False)
        self.begun += 1

    def agreed(self, work: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """`work()`; where it raises an error on any rank, all go on with `otherwise()` instead.

        What may fail comes before the first collective in `work`, if it has any: there the ranks compare.
        """
        if self._agreeing:
            return work()
        self._agreeing = True
        try:
            out = work()
            if self._agreeing:
                self._agree(False)
            return out
        except DuokaError:  # is every rank's
            raise
        except Exception:
            if not self._agreeing:  # they have agreed that none had failed before they met
                raise
            with suppress(Failed):
                self._agree(True)
        except Failed:
            pass
        finally:
            self._agreeing = False
        return otherwise()

    def _agree(self, failed: bool) -> None:
        """Raise Failed if any rank has failed."""
        self._agreeing = False
        begun = self.begun
        number = int(self.all_reduce(torch.tensor(int(failed), device="cpu"), ReduceOp.MAX))
        self.begun = begun  # it concerns no rows
        if number:
            raise Failed

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        """Begin to combine `tensor` over all ranks, in place; the function returned waits for it."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """(world_size, *tensor.shape): every rank's `tensor`, which has the same shape on all."""

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin it; the function returned waits for it and gives it."""
        found = self.all_gather(tensor)
        return lambda: found

    def start_all_to_all(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to send row r of `tensor`, shape (world_size, ...), to rank r.

        The function returned gives the rows that came, in the order of ranks.
        """
        found = self.all_gather(tensor)[:, self.rank]
        return lambda: found

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite `tensor` by the one that rank `source` has."""

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """Combine `tensor` over all ranks, in place: the same bits on every rank."""
        self.start_all_reduce(tensor, op)()
        return tensor

    def broadcast_into(self, tensor: Tensor, source: int) -> None:
        """Give `tensor` the values that rank `source` has, of whatever layout, touching it only if they differ."""
        if tensor.layout is not torch.strided:
            found = self.broadcast_object(tensor.detach(), source)
            if self.rank != source:
                tensor.data = found
            return
        values = self.broadcast(tensor.detach().clone(memory_format=torch.contiguous_format), source)
        if not torch.equal(values, tensor):
            with torch.no_grad():
                tensor.copy_(values)

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Rank `source`'s `value`, which pickle must know."""
        size = torch.zeros(1, dtype=torch.long, device="cpu")  # whatever the script's default is
        data = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self.rank == source:
            data = torch.frombuffer(bytearray(sign_object(value, self.key)), dtype=torch.uint8)
            size[0] = data.numel()
        self.broadcast(size, source)
        if self.rank != source:
            data = torch.empty(int(size.item()), dtype=torch.uint8, device="cpu")
        self.broadcast(data, source)
        return value if self.rank == source else verify_object(data.numpy().tobytes(), self.key)

    def come_to(self, what: str) -> None:  # noqa: B027
        """This rank comes to collectives of torch's own; who watches is shown them as one, by a word."""

    def leave(self) -> None:  # noqa: B027
        """They are over.

        Raises:
            RanksApart: other ranks came to something else.
        """

    def raised(self, error: str, line: str) -> None:  # noqa: B027
        """An error of a script's line may be this rank's alone: the next collective tells the others of it."""

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_reduce(torch.zeros(1, device="cpu"))

    def meet_at_end(self) -> None:
        """Wait for every rank's script to end."""
        self.barrier()


class ProcessCollectives(Collectives):
    """Collectives over torch's process groups: gloo for CPU tensors, nccl for CUDA tensors.

    Small CPU tensors go another way, where the ranks have one (`exchange`: nearby.py, direct.py).

    The groups are not torch's default group: a plain script still sees that none is initialised.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        slot: CollectiveSlot,
        exchange: Exchange | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._timeout, self._slot, self._exchange = store, timeout, slot, exchange
        self._groups: dict[str, Any] = {}
        self._line: Callable[[], str] = user_line
        self._raised: tuple[str, str] | None = None  # an error since the last collective, and its line
        self._threads = _Threads()
        slot.begin_collective(0, "start")  # the ranks wait for each other here, too
        self._group("cpu")
        slot.end_collective(0)

    def _group(self, device_type: str) -> Any:
        if device_type not in self._groups:
            store = PrefixStore(f"collectives/{device_type}", self._store)
            make = _BACKENDS[device_type]
            self._groups[device_type] = self._met(lambda: make(store, self.rank, self.world_size, self._timeout))
        return self._groups[device_type]

    def _met(self, call: Callable[[], Any]) -> Any:
        """Call torch; what the network does wrong is told in duoka's words: the cause is another rank."""
        try:
            return call()
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            where = f"in a collective at {user_line()}: {text}"
            if says(text, *TOO_LATE):
                raise TimedOut(f"rank {self.rank} waited in vain {where}") from error
            raise PeerLost(f"rank {self.rank} lost another rank {where}") from error

    def _start(
        self,
        name: str,
        tensor: Tensor,
        begin: Callable[[Any], Any],
        take: Callable[[list[Tensor]], Any],
    ) -> Callable[[], None]:
        """Begin a collective: by the exchange, where `take` gets every rank's tensor, or by `begin(group)`."""
        what = f"{name} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
        if self._exchange is not None and self._exchange.takes(tensor):
            if self._agreeing and not self.alone:  # who has failed sends nothing in its place
                self._agreeing, what = False, MAY_FAIL
            self.begin()
            return self._exchanging(what, tensor, take)
        self.begin()
        self._threads.begin()
        self._come_to(what)
        work = self._met(lambda: begin(self._group(tensor.device.type)))
        return lambda: self._leave(lambda: self._met(work.wait))

    def _exchanging(
        self, what: str, tensor: Tensor | None, take: Callable[[list[Tensor]], Any]
    ) -> Callable[[], None]:
        assert self._exchange is not None
        self._threads.begin()
        finish = self._exchange.start(tensor, take, self._come_to(what))
        return lambda: self._leave(finish)

    def _leave(self, finish: Callable[[], Any]) -> None:
        """Wait for the others, and be done with a collective."""
        since, failed = time.monotonic_ns(), None
        try:
            finish()
        except Failed as error:
            failed = error
        self._threads.end()
        self._slot.end_collective(time.monotonic_ns() - since)
        if failed is not None:
            raise failed

    def _agree(self, failed: bool) -> None:
        if self._exchange is None or self.alone:
            super()._agree(failed)
        else:
            self._agreeing = False
            told = None if failed else torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._exchanging(MAY_FAIL, told, lambda rows: None)()

    def come_to(self, what: str) -> None:
        self._come_to(what)

    def _come_to(self, what: str) -> bytes:
        """Show what this rank comes to; what all ranks call it."""
        line = self._line()
        text = told = f"{what}{self._threads.where()} at {line}"
        if self._raised is not None:  # the kind of error is its own matter: each rank has other rows
            error, where = self._raised
            text, told = f"{text} after {where}", f"{what}, after {error} at {where}, at {line}"
            self._raised = None
        self._enter(text.encode(), told)
        return text.encode()

    def _enter(self, text: bytes, told: str) -> None:
        """Come to what all ranks call `text`, and this one `told`."""
        self._slot.begin_collective(zlib.crc32(text), told)

    def raised(self, error: str, line: str) -> None:
        self._raised = error, line

    def leave(self) -> None:
        self._slot.end_collective(0)  # what of it was waiting, torch does not tell

    def meet_at_end(self) -> None:
        self._line = lambda: AT_END
        self.barrier()

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        if not tensor.is_contiguous():  # the network sends memory, not entries
            dense = tensor.contiguous()
            wait_for_dense = self.start_all_reduce(dense, op)

            def wait() -> None:
                wait_for_dense()
                tensor.copy_(dense)

            return wait
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = op

        def take(rows: list[Tensor]) -> None:
            combine = _COMBINE[op]
            total = combine(rows[0], rows[1])
            for row in rows[2:]:
                combine(total, row, out=total)
            tensor.copy_(total.view(tensor.shape))

        return self._start("all_reduce", tensor, lambda group: group.allreduce([tensor], options), take)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.start_all_gather(tensor)()

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        out = tensor.new_empty((self.world_size, tensor.numel()))
        flat = tensor.detach().reshape(-1)

        def take(rows: list[Tensor]) -> None:
            torch.stack(rows, out=out)

        wait = self._start("all_gather", flat, lambda group: start_all_gather(group, out.view(-1), flat), take)

        def gathered() -> Tensor:
            wait()
            return out.view(self.world_size, *tensor.shape)

        return gathered

    def start_all_to_all(self, tensor: Tensor) -> Callable[[], Tensor]:
        out, sent = torch.empty_like(tensor), tensor.detach().contiguous()

        def take(rows: list[Tensor]) -> None:
            torch.stack([row.view(tensor.shape)[self.rank] for row in rows], out=out)

        wait = self._start("all_to_all", sent, lambda group: group.alltoall_base(out, sent, [], []), take)

        def exchanged() -> Tensor:
            wait()
            return out

        return exchanged

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = source

        def take(rows: list[Tensor]) -> None:
            if source != self.rank:
                tensor.copy_(rows[source].view(tensor.shape))

        self._start("broadcast", tensor, lambda group: group.broadcast([tensor], options), take)()
        return tensor


class _Threads:
    """Sees that the threads of a script do not meet the other ranks in an order that is each rank's own.

    torch's own threads, which go back through a graph on a GPU, work for the one that waits for them.
    """

    def __init__(self) -> None:
        self._scripts = threading.get_ident()
        self._on_the_way = 0
        self._last: str | None = None  # who began the last collective

    def _name(self) -> str | None:
        """The thread's name, the same on all ranks; "" for the one that runs the script, None for torch's."""
        if threading.get_ident() == self._scripts:
            return ""
        name = threading.current_thread().name
        return None if name.startswith("Dummy-") else name

    def begin(self) -> None:
        """A collective begins.

        Raises:
            Refused: another thread's is not over.
        """
        name = self._name()
        if name is not None:
            if self._on_the_way and name != self._last:
                raise Refused(
                    f"{user_line()}: two threads of the script compute with batches at a time, whose steps the ranks "
                    "would take in different orders; let one wait for the other"
                )
            self._last = name
        self._on_the_way += 1

    def end(self) -> None:
        """It is over."""
        self._on_the_way -= 1

    def where(self) -> str:
        """` in thread Thread-1 (train)`, or nothing."""
        name = self._name()
        return f" in thread {name}" if name else ""


_COMBINE: dict[Any, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}


def _gloo(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    with without_gloo_messages():
        return torch.distributed.ProcessGroupGloo(store, rank, world_size, timeout)


def _nccl(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    return torch.distributed.ProcessGroupNCCL(store, rank, world_size, nccl_options(timeout))


_BACKENDS: dict[str, Callable[[Any, int, int, timedelta], Any]] = {"cpu": _gloo, "cuda": _nccl}
