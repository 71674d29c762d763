"""Ranks as threads of one process: quick enough for hundreds of random cases. Flow tests use real processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils import _python_dispatch

from duoka.collectives.base import Collectives
from duoka.view.generators import random_states, set_random_states
from duoka.view.tensor.batch import BatchTensor
from duoka.view.tensor.spec import Spec
from duoka.view.view import View

T = TypeVar("T")


class Table:
    """The exchange of the ranks of one test."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=120)  # second gradients take long on a busy machine
        self._rounds: list[list[Any]] = [[] for _ in range(world_size)]

    def exchange(self, rank: int, value: Any) -> list[Any]:
        rounds = self._rounds
        rounds[rank].append(value)
        self.barrier.wait()
        number = len(rounds[rank]) - 1
        if number:
            rounds[rank][number - 1] = None  # every rank has read it: it has come to this round
        return [values[number] for values in rounds]

    def turn(self) -> AbstractContextManager[None]:
        """Around a rank's whole work."""
        return nullcontext()


class Turns(Table):
    """One rank runs at a time, until it meets the others: each has the process's random numbers to itself."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._running = threading.Lock()
        self._start = random_states()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        own = random_states()
        self._running.release()
        try:
            return super().exchange(rank, value)
        finally:
            self._running.acquire()
            set_random_states(own)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """All ranks start with the random numbers that the process has now."""
        with self._running:
            set_random_states(self._start)
            yield


class ThreadRanks(Collectives):
    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.world_size = table, rank, table.world_size

    def _exchange(self, value: Any) -> list[Any]:
        self._before_collective()
        return self.table.exchange(self.rank, value)

    def _exchange_named(self, name: str, tensor: Tensor) -> list[Tensor]:
        met = self._exchange((name, tensor.shape, tensor.dtype, tensor.detach().clone()))
        assert len({(name, shape, dtype) for name, shape, dtype, _ in met}) == 1, met
        return [value for *_, value in met]

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        combine = {ReduceOp.SUM: torch.add, ReduceOp.MAX: torch.maximum, ReduceOp.MIN: torch.minimum}[op]
        values = self._exchange_named(f"all_reduce {op}", tensor)
        total = values[0]
        for value in values[1:]:
            total = combine(total, value)
        with torch.no_grad():
            tensor.copy_(total)
        return lambda: None

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange_named("all_gather", tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        values = self._exchange(tensor.detach().clone())
        assert self.rank == source or values[source].shape == tensor.shape
        with torch.no_grad():
            return tensor.copy_(values[source])

    def broadcast_object(self, value: Any, source: int) -> Any:
        return self._exchange(value)[source]


def on_ranks(world_size: int, work: Callable[[View], T], table: Table | None = None) -> list[T]:
    """What `work` gives on each of `world_size` ranks; the first error of any is raised."""
    table = table or Table(world_size)
    errors: list[BaseException] = []

    def one(rank: int) -> T:
        try:
            with table.turn():
                return work(View(ThreadRanks(table, rank), adopt=lambda leaf: None))
        except threading.BrokenBarrierError:
            raise
        except BaseException as error:
            errors.append(error)
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(world_size)]
        for future in futures:
            future.exception()
    # torch has one such flag for all threads, and modes that they enter and leave in turn may leave it set.
    _python_dispatch._is_in_any_mode_without_ignore_compile_internals = False
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def in_turns(world_size: int, work: Callable[[View], T]) -> list[T]:
    """As `on_ranks`, for work that draws random numbers: each rank starts with those that the process has."""
    return on_ranks(world_size, work, Turns(world_size))


def shared(view: View, whole: Tensor, dim: int = 0) -> BatchTensor:
    """This rank's batch tensor of a tensor that every rank has."""
    spec = Spec(view, view.partition(whole.shape[dim]), dim)
    rows = spec.local_rows(whole)
    # Of a tensor without elements torch keeps strides that are not those of its shape, here of other rows.
    form = torch.preserve_format if rows.numel() else torch.contiguous_format
    return BatchTensor(rows.clone(memory_format=form), spec)


def whole_of(value: Any) -> Any:
    """The replicated value of a batch tensor."""
    return value.full_tensor() if isinstance(value, BatchTensor) else value
