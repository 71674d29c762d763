"""The devices at work: a thread for each, fed whenever it has room.

Threads, for GPUs and for CPUs: torch lets go of the interpreter while it computes. A fork of a program that has
computed can hang in the libraries below torch, and new processes would each import torch and copy the model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from duoka.errors import RunError, TimedOut
from duoka.inference.replica import Replica, is_fatal
from duoka.inference.sources import Batch
from duoka.libc import raise_in_thread

AT_HAND = 2  # batches that a device has: one to compute, and the next
TO_LEAVE = 2.0  # seconds that threads have to come back from the operation that they are in
STEP = 0.1  # seconds that they have by themselves, and between two calls to leave


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a batch on a device: outputs, one for each item, or an error."""

    batch: Batch
    device: str
    outputs: list[Any] = field(default_factory=list)
    error: BaseException | None = None


class Crew(Protocol):
    """What computes batches, whichever comes first."""

    def has_room(self) -> bool:
        """Whether a batch can be given now."""
        ...

    def give(self, batch: Batch) -> None:
        """Have a batch computed."""
        ...

    def take(self) -> Result:
        """The next result; waits for it."""
        ...

    def close(self) -> None:
        """End all work, without waiting for what is under way."""
        ...


class Alone:
    """One device, in the thread that asks: nothing is read ahead."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._given: Batch | None = None

    def has_room(self) -> bool:
        return self._given is None

    def give(self, batch: Batch) -> None:
        self._given = batch

    def take(self) -> Result:
        assert self._given is not None
        batch, self._given = self._given, None
        return _computed(self._replica, batch)

    def close(self) -> None:
        self._given = None


class Threads:
    """Several devices, or one that computes while the next batch is read.

    timeout: seconds without any result after which a device is taken to hang. threads: of each, where they are
    CPUs; None leaves that to torch.
    """

    def __init__(self, replicas: Sequence[Replica], timeout: float, threads: int | None) -> None:
        self._outbox: queue.SimpleQueue[tuple[_Worker, Result]] = queue.SimpleQueue()
        self._timeout = timeout
        self._threads_before = torch.get_num_threads() if threads is not None else None
        self._workers = [_Worker(replica, self._outbox, threads) for replica in replicas]
        self._again: deque[Batch] = deque()
        for worker in self._workers:
            worker.start()

    def has_room(self) -> bool:
        return any(worker.has_room() for worker in self._workers)

    def give(self, batch: Batch) -> None:
        min(self._workers, key=lambda worker: len(worker.batches)).give(batch)

    def take(self) -> Result:
        """The next result. What a device that died had is given to the others.

        Raises:
            RunError: no device is left.
            TimedOut: none gave anything in time.
        """
        while True:
            worker, result = self._next()
            worker.batches.remove(result.batch)
            if result.error is None or not is_fatal(result.error):
                self._pass_on()
                return result
            self._bury(worker, result)
            if result.batch.deaths > 1:  # it is the batch that kills
                return result
            self._again.append(result.batch)
            self._pass_on()

    def _next(self) -> tuple[_Worker, Result]:
        try:
            return self._outbox.get(timeout=self._timeout)
        except queue.Empty:
            busy = [worker for worker in self._workers if worker.batches]
            had = ", ".join(f"{one.replica.device} computes the batch that begins with {one.item}" for one in busy)
            raise TimedOut(f"no batch was finished in {self._timeout:g} s; {had}") from None

    def _bury(self, worker: _Worker, result: Result) -> None:
        result.batch.deaths += 1
        self._workers.remove(worker)
        self._again.extend(worker.batches)
        if not self._workers:
            raise RunError(f"no device is left: {result.device} was the last, and failed with: {result.error}")

    def _pass_on(self) -> None:
        while self._again and self.has_room():
            self.give(self._again.popleft())

    def close(self) -> None:
        for worker in self._workers:
            worker.leave()
        deadline = time.monotonic() + TO_LEAVE
        while (
            self._any_left(STEP) and time.monotonic() < deadline
        ):  # python must not end while one is inside of torch
            for worker in self._workers:
                worker.interrupt()  # again and again: there are places where python drops an exception
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)  # a worker's own setting also counts for new threads

    def _any_left(self, seconds: float) -> bool:
        """Give the threads some time to end; whether one has not."""
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        return any(worker.is_alive() for worker in self._workers)


class _Worker(threading.Thread):
    """The thread of one device. batches: those that it has and has given no result for."""

    def __init__(
        self, replica: Replica, outbox: queue.SimpleQueue[tuple[_Worker, Result]], threads: int | None
    ) -> None:
        super().__init__(name=f"duoka-predict-{replica.device}", daemon=True)
        self.replica = replica
        self.batches: list[Batch] = []
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._outbox, self._threads = outbox, threads
        self._leaving = False

    @property
    def item(self) -> str:
        """The first item of what it computes."""
        return f"item {self.batches[0].indices.start:,}"

    def has_room(self) -> bool:
        return len(self.batches) < AT_HAND

    def give(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._inbox.put(batch)

    def leave(self) -> None:
        """Have it end after the batch under way."""
        self._leaving = True
        self._inbox.put(None)

    def interrupt(self) -> None:
        """Have it end as soon as it is back from the operation of torch that it is in."""
        if self.is_alive() and self.ident is not None:
            raise_in_thread(self.ident, _Leave)

    def run(self) -> None:
        with suppress(_Leave):
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            while (batch := self._inbox.get()) is not None and not self._leaving:
                result = _computed(self.replica, batch)
                self._outbox.put((self, result))
                if result.error is not None and is_fatal(result.error):
                    return


class _Leave(SystemExit):
    """Raised in a thread that is to end."""


def _computed(replica: Replica, batch: Batch) -> Result:
    device = str(replica.device)
    try:
        return Result(batch, device, replica.compute(batch))
    except Exception as error:
        return Result(batch, device, error=error)
