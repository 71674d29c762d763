"""Pools of devices that compute batches: one thread for each device, kept busy.

Threads are used for GPUs and CPUs: torch releases the GIL while it computes. A fork of a program that has computed
can hang in the libraries that torch uses, and new processes would each import torch and copy the model.
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
from duoka.system.libc import raise_in_thread

QUEUED = 2  # batches queued on a device: one in computation, and the next
STOP_LIMIT = 2.0  # seconds for threads to return from their current operation
STEP = 0.1  # seconds before threads are interrupted, and between interrupts


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a batch: one output for each item, or an error."""

    batch: Batch
    device: str
    outputs: list[Any] = field(default_factory=list)
    error: BaseException | None = None


class Pool(Protocol):
    """Computes batches in any order."""

    def has_room(self) -> bool:
        """Return True if a batch can be submitted now."""
        ...

    def submit(self, batch: Batch) -> None:
        """Queue a batch."""
        ...

    def next_result(self) -> Result:
        """Return the next result, waiting for it."""
        ...

    def close(self) -> None:
        """Stop all work, without waiting for batches under way."""
        ...


class InlinePool:
    """One device, in the caller's thread: batches are computed on demand."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._batch: Batch | None = None

    def has_room(self) -> bool:
        return self._batch is None

    def submit(self, batch: Batch) -> None:
        self._batch = batch

    def next_result(self) -> Result:
        assert self._batch is not None
        batch, self._batch = self._batch, None
        return _computed(self._replica, batch)

    def close(self) -> None:
        self._batch = None


class ThreadPool:
    """Several devices, or one that computes while the next batch is read.

    timeout: seconds without any result after which a device counts as hung. threads: CPU threads of each device, if
    they are CPUs; None for torch's default.
    """

    def __init__(self, replicas: Sequence[Replica], timeout: float, threads: int | None) -> None:
        self._outbox: queue.SimpleQueue[tuple[_Worker, Result]] = queue.SimpleQueue()
        self._timeout = timeout
        self._threads_before = torch.get_num_threads() if threads is not None else None
        self._workers = [_Worker(replica, self._outbox, threads) for replica in replicas]
        self._to_resubmit: deque[Batch] = deque()
        for worker in self._workers:
            worker.start()

    def has_room(self) -> bool:
        return any(worker.has_room() for worker in self._workers)

    def submit(self, batch: Batch) -> None:
        min(self._workers, key=lambda worker: len(worker.batches)).submit(batch)

    def next_result(self) -> Result:
        """Return the next result. Batches of a device that failed are submitted to the others.

        Raises:
            RunError: no device is left.
            TimedOut: no batch was finished in time.
        """
        while True:
            worker, result = self._next()
            worker.batches.remove(result.batch)
            if result.error is None or not is_fatal(result.error):
                self._resubmit()
                return result
            self._remove_worker(worker, result)
            if result.batch.device_failures > 1:  # the batch itself makes devices fail
                return result
            self._to_resubmit.append(result.batch)
            self._resubmit()

    def _next(self) -> tuple[_Worker, Result]:
        try:
            return self._outbox.get(timeout=self._timeout)
        except queue.Empty:
            busy = [worker for worker in self._workers if worker.batches]
            had = ", ".join(f"{one.replica.device} computes the batch that begins with {one.item}" for one in busy)
            raise TimedOut(f"no batch was finished in {self._timeout:g} s; {had}") from None

    def _remove_worker(self, worker: _Worker, result: Result) -> None:
        result.batch.device_failures += 1
        self._workers.remove(worker)
        self._to_resubmit.extend(worker.batches)
        if not self._workers:
            raise RunError(f"no device is left: {result.device} was the last, and failed with: {result.error}")

    def _resubmit(self) -> None:
        while self._to_resubmit and self.has_room():
            self.submit(self._to_resubmit.popleft())

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        deadline = time.monotonic() + STOP_LIMIT
        # Python must not exit while a thread is inside torch.
        while self._any_left(STEP) and time.monotonic() < deadline:
            for worker in self._workers:
                worker.interrupt()  # repeated, since Python may drop an asynchronous exception
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)  # a worker's setting also applies to new threads

    def _any_left(self, seconds: float) -> bool:
        """Join the threads for some time; returns True if one is still alive."""
        deadline = time.monotonic() + seconds
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        return any(worker.is_alive() for worker in self._workers)


class _Worker(threading.Thread):
    """The thread of one device. batches: submitted and without a result."""

    def __init__(
        self, replica: Replica, outbox: queue.SimpleQueue[tuple[_Worker, Result]], threads: int | None
    ) -> None:
        super().__init__(name=f"duoka-predict-{replica.device}", daemon=True)
        self.replica = replica
        self.batches: list[Batch] = []
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._outbox, self._threads = outbox, threads
        self._stopping = False

    @property
    def item(self) -> str:
        """The first item of the current batch, for messages."""
        return f"item {self.batches[0].indices.start:,}"

    def has_room(self) -> bool:
        return len(self.batches) < QUEUED

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._inbox.put(batch)

    def stop(self) -> None:
        """Let the thread end after the current batch."""
        self._stopping = True
        self._inbox.put(None)

    def interrupt(self) -> None:
        """Raise an exception in the thread, as soon as it returns from torch."""
        if self.is_alive() and self.ident is not None:
            raise_in_thread(self.ident, _StopThread)

    def run(self) -> None:
        with suppress(_StopThread):
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            while (batch := self._inbox.get()) is not None and not self._stopping:
                result = _computed(self.replica, batch)
                self._outbox.put((self, result))
                if result.error is not None and is_fatal(result.error):
                    return


class _StopThread(SystemExit):
    """Raised in a thread to stop it."""


def _computed(replica: Replica, batch: Batch) -> Result:
    device = str(replica.device)
    try:
        return Result(batch, device, replica.compute(batch))
    except Exception as error:
        return Result(batch, device, error=error)
