"""Collectives over torch's process groups."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic_ns  # a script's `time.monotonic_ns` may be rank 0's
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp, Store  # type: ignore[attr-defined]

from duoka.collectives.base import AGREEMENT, Collectives, Exchange, PeerFailed, T
from duoka.collectives.streams import StreamEnds
from duoka.errors import PeerLost, RanksApart, Refused, TimedOut
from duoka.private.texts import TOO_LATE, says
from duoka.private.torch import make_backend, start_all_gather, start_reduce_scatter
from duoka.supervision.status_board import AT_END, StatusSlot
from duoka.system.user_code import user_line

# What all backends send; other types, complex numbers among them, are sent as these.
_SENT = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
_WIDER = {True: torch.float32, False: torch.int64}  # is it a type of floats? -> a type that holds its sums
EVERY = 1024  # collectives between two comparisons of all ranks' names of them
MIN: Any = ReduceOp.MIN


class ProcessCollectives(Collectives):
    """Collectives over torch's process groups: gloo for CPU tensors, a vendor's for those of its devices.

    The groups are not torch's default group, which a plain script does not have.

    Args:
        store: torch's store, of all ranks.
        rank: of this process.
        world_size: number of ranks.
        timeout: of the process groups.
        slot: receives the name of each collective.
        exchange: for small CPU tensors (`shared_memory.py`, `direct.py`); None: gloo.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        slot: StatusSlot,
        exchange: Exchange | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._time_limit, self._slot, self._exchange = store, timeout, slot, exchange
        self._groups: dict[str, Any] = {}
        self._line: Callable[[], str] = user_line
        self._raised: tuple[str, str] | None = None  # an error since the last collective, and its line
        self._threads = _Threads()
        self._process = os.getpid()
        self._ends = StreamEnds(slot)
        slot.begin_collective(0, "start")  # gloo waits for all ranks
        self._group("cpu")
        slot.end_collective(0)

    def _group(self, device_type: str) -> Any:
        if device_type not in self._groups:
            store = PrefixStore(f"collectives/{device_type}", self._store)
            self._groups[device_type] = self._call_torch(
                lambda: make_backend(device_type, store, self.rank, self.world_size, self._time_limit)
            )
        return self._groups[device_type]

    def _call_torch(self, call: Callable[[], Any]) -> Any:
        """Call torch, and convert any RuntimeError of the collective but those of this rank's own device.

        Raises:
            TimedOut: another rank did not answer in time.
            PeerLost: any other RuntimeError, such as a lost connection to another rank.
        """
        try:
            return call()
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            where = f"in a collective at {user_line()}: {text}"
            if says(text, *TOO_LATE):
                raise TimedOut(f"rank {self.rank} waited for other ranks {where}") from error
            raise PeerLost(f"rank {self.rank} lost another rank {where}") from error

    def _start(
        self, name: str, tensor: Tensor, begin: Callable[[Any], Any], receive: Callable[[list[Tensor]], Any]
    ) -> Callable[[], None]:
        """Start a collective: by the exchange, which calls `receive`, or by `begin(group)`."""
        if not self.isolated:
            self._slot.check_interruption()
        what = f"{name} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
        if self._exchange is not None and self._exchange.accepts(tensor):
            if self._agreeing and not self.isolated:  # a rank that has failed sends None
                self._agreeing, what = False, AGREEMENT
            self._before_collective()
            return self._start_exchange(what, tensor, receive)
        self._before_collective()
        self._threads.begin()
        self._begin(what)
        # gloo would add up other numbers, or hang; an exchange compares the names of collectives at its end.
        self._slot.check_begun()
        work = self._call_torch(lambda: begin(self._group(tensor.device.type)))
        wait: Callable[[], Any] = work.wait
        if tensor.is_cpu:
            return lambda: self._finish(lambda: self._call_torch(wait))
        if (clock := self.all_ranks.stream_waits) is not None:
            wait = clock.timed(wait)

        def order() -> None:
            self._call_torch(wait)  # the stream waits
            self._threads.end()
            self._ends.add(tensor.device)

        return order

    def _start_exchange(
        self, what: str, tensor: Tensor | None, receive: Callable[[list[Tensor]], Any]
    ) -> Callable[[], None]:
        assert self._exchange is not None
        self._threads.begin()
        finish = self._exchange.start(tensor, receive, self._begin(what))
        return lambda: self._finish(finish)

    def _finish(self, finish: Callable[[], Any]) -> None:
        """Wait for a collective, and record its end."""
        since, failed = monotonic_ns(), None
        try:
            finish()
        except PeerFailed as error:
            failed = error
        self._threads.end()
        waited = monotonic_ns() - since
        self.all_ranks.waited += waited
        self._slot.end_collective(waited)
        if failed is not None:
            raise failed

    def _agree(self, failed: bool) -> None:
        probe = torch.zeros(1, dtype=torch.uint8, device="cpu")
        if self._exchange is None or self.isolated or not self._exchange.accepts(probe):
            super()._agree(failed)
        else:
            self._agreeing = False
            self._start_exchange(AGREEMENT, None if failed else probe, lambda rows: None)()

    def show_rows(self, rows: int, seconds: float = 0.0) -> None:
        self._slot.show_rows(rows, seconds)

    def _begin(self, what: str) -> bytes:
        """Record the collective that begins, and return its name, which is the same on all ranks.

        Raises:
            Refused: the script has forked this process, which would take part in place of its rank; or this rank
                reads rows that the other ranks do not read, whose collectives would be others.
        """
        line = self._line()
        if self.reads_alone():
            raise Refused(
                f"{line} computes with a batch or a sharded parameter while this rank reads its own rows, without "
                "the other ranks; use --loading whole"
            )
        if os.getpid() != self._process:
            raise Refused(
                f"{line} computes with a batch or a sharded parameter in a process that the script started, without "
                "the other ranks; do so in the script's own process, or with plain tensors: torch.tensor(x.tolist())"
            )
        text = shown = f"{what}{self._threads.where()} at {line}"
        if self._raised is not None:  # the type of the error may differ between ranks
            error, where = self._raised
            text, shown = f"{text} after {where}", f"{what}, after {error} at {where}, at {line}"
            self._raised = None
        self._enter(text.encode(), shown)
        return text.encode()

    def _enter(self, text: bytes, shown: str) -> None:
        """Record a collective. text: its name on all ranks; shown: the same with details of this rank."""
        self._slot.begin_collective(zlib.crc32(text), shown)

    def raised(self, error: str, line: str) -> None:
        self._raised = error, line

    def meet(self, name: str) -> bool:
        if self._exchange is None:
            return super().meet(name)
        return self._exchange.meet(
            self._slot, zlib.crc32(name.encode()), f"{name.partition(' ')[0]} at {self._line()}"
        )

    def leave(self) -> None:
        self._slot.leave()

    def reading(self, now: Any, line: int, expected: bool) -> Any:
        agrees = self._exchange is None or self._agreeing  # by a collective
        value = None if agrees else self._exchange.reading(self._slot, line, now, expected)  # type: ignore[union-attr]
        return super().reading(now, line, expected) if value is None else value

    def barrier_at_end(self) -> None:
        self._line = lambda: AT_END
        self.barrier()

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        if not tensor.is_contiguous() or tensor.dtype not in _SENT:  # process groups send memory
            dense = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            dense = dense.contiguous() if dense.dtype in _SENT else dense.to(_WIDER[dense.is_floating_point()])
            wait_for_dense = self.start_all_reduce(dense, op)

            def wait() -> None:
                wait_for_dense()
                tensor.copy_(torch.view_as_complex(dense) if tensor.is_complex() else dense)

            return wait

        def begin(group: Any) -> Any:
            options = torch.distributed.AllreduceOptions()
            options.reduceOp = op
            return group.allreduce([tensor], options)

        def receive(rows: list[Tensor]) -> None:
            combine = _COMBINE[op]
            total = combine(rows[0], rows[1])
            for row in rows[2:]:
                combine(total, row, out=total)
            tensor.copy_(total.view(tensor.shape))

        return self._start("all_reduce", tensor, begin, receive)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self.start_all_gather(tensor)()

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        out = tensor.new_empty((self.world_size, tensor.numel()))
        flat = tensor.detach().reshape(-1).contiguous().resolve_conj().resolve_neg()  # a column is flat, and has gaps

        def begin(group: Any) -> Any:
            return start_all_gather(group, _sendable(out.view(-1)), _sendable(flat))

        def receive(rows: list[Tensor]) -> None:
            torch.stack(rows, out=out)

        wait = self._start("all_gather", flat, begin, receive)

        def gathered() -> Tensor:
            wait()
            return out.view(self.world_size, *tensor.shape)

        return gathered

    def in_background(self, wait: Callable[[], T], started: int = 1) -> Callable[[], T]:
        # On the status board they end here, as this rank does not wait for the others yet; `wait_now` records the
        # wait.
        for _ in range(started):
            self._threads.end()
            self._slot.end_collective(0)

        def wait_now() -> T:
            for _ in range(started):
                self._threads.begin()
                self._begin("wait")
            return wait()

        return wait_now

    def start_all_to_all(self, tensor: Tensor) -> Callable[[], Tensor]:
        out, sent = torch.empty_like(tensor), tensor.detach().contiguous()

        def receive(rows: list[Tensor]) -> None:
            torch.stack([row.view(tensor.shape)[self.rank] for row in rows], out=out)

        def begin(group: Any) -> Any:
            return group.alltoall_base(_sendable(out), _sendable(sent), [], [])

        wait = self._start("all_to_all", sent, begin, receive)

        def exchanged() -> Tensor:
            wait()
            return out

        return exchanged

    def start_reduce_scatter(self, tensor: Tensor) -> Callable[[], Tensor]:
        if tensor.device.type == "cpu":  # gloo's is an all-reduce
            return super().start_reduce_scatter(tensor)
        out, sent = tensor.new_empty(tensor.shape[1:]), tensor.detach().reshape(-1)
        wait = self._start(
            "reduce_scatter", sent, lambda group: start_reduce_scatter(group, out, sent), lambda rows: None
        )

        def summed() -> Tensor:
            wait()
            return out

        return summed

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        if not tensor.is_contiguous() or tensor.is_neg():  # process groups send memory
            return tensor.copy_(self.broadcast(tensor.contiguous().resolve_neg(), source))
        options = torch.distributed.BroadcastOptions()
        options.rootRank = source

        def receive(rows: list[Tensor]) -> None:
            if source != self.rank:
                tensor.copy_(rows[source].view(tensor.shape))

        self._start("broadcast", tensor, lambda group: group.broadcast([_sendable(tensor)], options), receive)()
        return tensor


class MultiHostCollectives(ProcessCollectives):
    """Collectives of ranks that share no memory, usually on several machines.

    On one machine each rank compares the name of its collective with those on the status board. Between machines,
    small tensors carry the name (`direct.py`), but tensors sent by torch do not: two different collectives of the
    same size would be added up. So the ranks compare a checksum of the names of all collectives, at every barrier and
    every EVERY collectives.
    """

    _count = _checksum = 0  # of the names of collectives so far

    def _enter(self, text: bytes, shown: str) -> None:
        super()._enter(text, shown)
        self._count += 1
        self._checksum = zlib.crc32(text, self._checksum)
        if self._count % EVERY == 0:
            self._compare()

    def barrier(self) -> None:
        super().barrier()
        self._compare()

    def _compare(self) -> None:
        """Compare the checksums, in one more collective.

        Raises:
            RanksApart: the ranks have not called the same collectives.
        """
        least_and_most = torch.tensor([self._checksum, -self._checksum], device="cpu")
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = MIN
        group = self._group("cpu")
        self._call_torch(lambda: group.allreduce([least_and_most], options).wait())
        least, most = least_and_most.tolist()
        if least != -most:
            raise RanksApart(
                f"the ranks of different machines called different collectives, somewhere before {user_line()}: they "
                "added up tensors that do not belong together"
            )


class PartCollectives(ProcessCollectives):
    """Collectives of the ranks `members` of all ranks, in this order, such as those of one machine.

    The parts divide the ranks, and all parts call the same collectives at the same time. So these are counted and
    compared as if they were collectives of all ranks. name: of the parts, equal on all ranks.
    """

    def __init__(self, all_ranks: ProcessCollectives, members: Sequence[int], name: str) -> None:
        self.rank, self.world_size = members.index(all_ranks.rank), len(members)
        self.key = all_ranks.key
        self._all_ranks, self._members = all_ranks, tuple(members)
        self._store = PrefixStore(f"{name}/{members[0]}", all_ranks._store)
        self._time_limit, self._slot, self._threads = all_ranks._time_limit, all_ranks._slot, all_ranks._threads
        self._ends = all_ranks._ends
        self._exchange = None
        self._groups = {}

    @property
    def all_ranks(self) -> ProcessCollectives:
        return self._all_ranks

    @property
    def members(self) -> Sequence[int]:
        return self._members

    @property
    def isolated(self) -> bool:
        """True while this rank tries something out by itself."""
        return self._all_ranks.isolated

    @isolated.setter
    def isolated(self, value: bool) -> None:
        self._all_ranks.isolated = value

    def _before_collective(self) -> None:
        super()._before_collective()
        self._all_ranks._before_collective()

    def _begin(self, what: str) -> bytes:
        return self._all_ranks._begin(what)

    def raised(self, error: str, line: str) -> None:
        self._all_ranks.raised(error, line)


def _sendable(tensor: Tensor) -> Tensor:
    """Return a tensor, or, of types that not every backend sends, its contiguous memory as bytes."""
    return tensor if tensor.dtype in _SENT else tensor.view(-1).view(torch.uint8)


class _Threads:
    """Checks that no two threads of the script call collectives at a time, as their order may differ between ranks.

    torch's own threads, which run the backward pass of a GPU, count as the thread that waits for them.
    """

    def __init__(self) -> None:
        self._scripts = threading.get_ident()
        self._running = 0
        self._last: str | None = None  # the name of the thread that began the last collective

    def _name(self) -> str | None:
        """Return the thread's name, equal on all ranks: "" for the script's main thread, None for torch's."""
        if threading.get_ident() == self._scripts:
            return ""
        name = threading.current_thread().name
        return None if name.startswith("Dummy-") else name

    def begin(self) -> None:
        """Note the start of a collective.

        Raises:
            Refused: another thread's has not ended.
        """
        name = self._name()
        if name is not None:
            if self._running and name != self._last:
                raise Refused(
                    f"{user_line()}: two threads of the script compute with batches at the same time, in an order "
                    "that may differ between ranks; let one wait for the other"
                )
            self._last = name
        self._running += 1

    def end(self) -> None:
        """Note its end."""
        self._running -= 1

    def where(self) -> str:
        """Return ` in thread Thread-1 (train)`, or nothing for the main thread."""
        name = self._name()
        return f" in thread {name}" if name else ""


_COMBINE: dict[Any, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
}
