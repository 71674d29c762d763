"""The workers of one attempt, as the command process sees them."""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from duoka.errors import WorkerFailed
from duoka.launchers.processes import Outputs, Signals, fork, interrupt_loader_workers, kill_sessions, redirect
from duoka.launchers.worker import STACKS_SIGNAL, Attempt, run_worker
from duoka.network.connection import Channel
from duoka.supervision.ending import Ending
from duoka.system.processes import session_members

STEP = 0.05  # seconds between two polls of what no file descriptor signals
TO_TERMINATE = 3.0  # seconds between SIGTERM and SIGKILL
TO_DIE = 2.0  # seconds that a process may take to end after SIGKILL


@dataclass(slots=True)
class Worker:
    """One worker process."""

    rank: int
    pid: int
    pipe: socket.socket
    stacks: int  # the file descriptor to which it dumps its stacks
    own_log: bool  # its output goes to a log file of its own
    ending: Ending | None = None
    status: int | None = None  # its exit code, or minus the number of the signal that ended it; None: it is alive
    afterwards: str = ""  # tracebacks of functions that ran at exit, after its script had ended well
    ended_at: float = 0.0  # CLOCK_MONOTONIC when its end was seen
    signalled_at: float | None = None  # the same, of the first signal sent to end it
    received: bytearray = field(default_factory=bytearray)

    @property
    def alive(self) -> bool:
        """Return whether its process has not ended."""
        return self.status is None

    @property
    def done(self) -> bool:
        """Return whether its script or its process has ended."""
        return self.ending is not None or not self.alive

    @property
    def succeeded(self) -> bool:
        """Return whether its script ended with exit code 0."""
        return self.ending.code == 0 if self.ending is not None else self.status == 0

    @property
    def was_signalled(self) -> bool:
        """Return whether a signal was sent to end it."""
        return self.signalled_at is not None

    @property
    def bad_ending(self) -> Ending | None:
        """Return how its script ended, if it ended badly."""
        return self.ending if self.ending is not None and self.ending.code != 0 else None

    @property
    def failed(self) -> bool:
        """Return whether it ended badly before it was signalled to end; a script may handle that, as by saving."""
        if self.bad_ending is not None:
            return self.signalled_at is None or self.bad_ending.time < self.signalled_at
        return self.status not in (None, 0) and not self.was_signalled

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker, if it is alive, and to the processes of its group."""
        if self.alive and self.signalled_at is None:
            self.signalled_at = time.monotonic()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)  # the group may live longer than its leader


class WorkerGroup:
    """The workers of one attempt: forked, listened to and ended together."""

    def __init__(self, signals: Signals, channel: Channel | None = None) -> None:
        self.signals, self._channel = signals, channel  # to other machines, whose messages are received meanwhile
        self.workers: list[Worker] = []
        self._passed_on = len(signals.for_scripts)
        self._shared_memory: mmap.mmap | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.fd, selectors.EVENT_READ)
        if channel is not None:
            self._selector.register(channel.file, selectors.EVENT_READ, channel)

    @property
    def pids(self) -> list[int]:
        """The workers' processes, each of which leads a session."""
        return [worker.pid for worker in self.workers]

    def start(self, attempt: Attempt, outputs: Outputs) -> None:
        """Fork the workers. Each waits for `go`.

        Raises WorkerFailed if the system refuses to start more processes.
        """
        self._shared_memory = attempt.shared_memory
        try:
            for rank in attempt.plan.ranks:
                self._fork(rank, attempt, outputs)
        except OSError as error:
            count, size = len(self.workers), attempt.plan.workers
            raise WorkerFailed(f"only {count} of {size} workers could be started: {error.strerror}") from None

    def _fork(self, rank: int, attempt: Attempt, outputs: Outputs) -> None:
        ours, theirs = socket.socketpair()
        stacks, own_log = os.memfd_create(f"duoka-stacks-{rank}"), rank in outputs.files

        def life() -> int:
            # The command's ends of connections, which copies here would keep open when it dies.
            ours.close()
            self._close_files()
            if self._channel is not None:
                self._channel.close_files()
            redirect(outputs.files.get(rank), stdin=rank == 0)
            outputs.close()
            return run_worker(attempt, rank, own_log, theirs, stacks)

        worker = Worker(rank, fork(life, self.signals), ours, stacks, own_log)
        theirs.close()
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self.workers.append(worker)

    def go(self, port: int) -> None:
        """Send the port of the store to the workers, which then start."""
        for worker in self.workers:
            with suppress(OSError):  # it has died, which `listen` notices
                worker.pipe.send(b"%d\n" % port)

    # Events.

    def listen(self, seconds: float) -> None:
        """Wait up to `seconds` for an event, and handle all that have happened."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                self.signals.read()
                for number in self.signals.for_scripts[self._passed_on :]:
                    self.signal(number)  # a script without a handler is ended by it
                self._passed_on = len(self.signals.for_scripts)
            elif isinstance(key.data, Channel):
                key.data.read()
            else:
                self._receive(key.data)
        for worker in self.workers:  # not only after SIGCHLD: many may come as one
            if worker.alive:
                self._poll(worker)
        if self.failed():
            self.end_waits()

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Handle events until `until()` is true, for at most `seconds`; return whether it became true."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.listen(min(left, STEP))
        return True

    def gone(self) -> bool:
        """Return whether all worker processes have ended."""
        return not any(worker.alive for worker in self.workers)

    def done(self) -> bool:
        """Return whether all scripts have ended."""
        return all(worker.done for worker in self.workers)

    def failed(self) -> bool:
        """Return whether a worker ended badly."""
        return any(worker.failed for worker in self.workers)

    def end_waits(self) -> None:
        """Wake ranks that wait in shared memory, where they cannot notice that another rank is lost."""
        if self._shared_memory is not None:
            from duoka.collectives.shared_memory import give_up

            give_up(self._shared_memory)

    def _receive(self, worker: Worker) -> None:
        try:
            data = worker.pipe.recv(1 << 16)
        except OSError:
            data = b""
        worker.received += data
        if not data:
            self._selector.unregister(worker.pipe)
        first, *more = bytes(worker.received).splitlines(keepends=True) or [b""]
        if first.endswith(b"\n") and worker.ending is None:
            worker.ending = Ending.from_line(first)
        if more and more[0].endswith(b"\n"):
            worker.afterwards = json.loads(more[0])

    def _poll(self, worker: Worker) -> None:
        """Update the status of a worker whose process may have ended."""
        # WNOWAIT: `close` reaps it, so that no other process gets its pid, and thus its signals, before.
        seen = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return
        while worker.pipe in self._selector.get_map():
            self._receive(worker)  # its last message may have come together with its end
        worker.status = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
        worker.ended_at = time.monotonic()

    # The end of the workers.

    def signal(self, number: int) -> None:
        """Send a signal to the workers; SIGINT goes to their process groups, as a terminal sends it."""
        for worker in self.workers:
            if worker.alive:  # its pid is its own as long as it is not reaped
                (os.killpg if number == signal.SIGINT else os.kill)(worker.pid, number)

    def wake(self) -> None:
        """Interrupt system calls of the workers' main threads.

        The kernel may have delivered a signal to another thread; Python's handler runs only in the main thread.
        """
        for worker in self.workers:
            if worker.alive:
                os.kill(worker.pid, STACKS_SIGNAL)

    def end(self) -> None:
        """End the workers and the processes that they started: by SIGTERM, then SIGKILL; within 5.5 s.

        Workers whose script has ended get that time to exit. A second Ctrl-C shortens it.
        """
        hurried = self.signals.interrupts
        self.end_waits()

        def nothing_left() -> bool:
            return self.gone() and not session_members(self.pids)

        if not nothing_left():
            interrupt_loader_workers([worker.pid for worker in self.workers if not (worker.alive and worker.done)])
            for worker in self.workers:
                if not (worker.alive and worker.done):
                    worker.send_signal(signal.SIGTERM)
                    worker.send_signal(signal.SIGCONT)  # a stopped process takes it when it goes on
            self.wait(lambda: nothing_left() or self.signals.interrupts > hurried, TO_TERMINATE)
        self.kill()

    def kill(self) -> None:
        """Kill the workers and the processes that they started."""
        for worker in self.workers:
            worker.send_signal(signal.SIGKILL)
        kill_sessions(self.pids)  # those in other process groups
        self.wait(self.gone, TO_DIE)

    def close(self) -> None:
        """Reap the workers and close the files of this group."""
        if not self.gone():  # an exception came before `end`
            self.kill()
        for worker in self.workers:
            if not worker.alive:
                os.waitpid(worker.pid, 0)
        self._close_files()

    def _close_files(self) -> None:
        for worker in self.workers:
            worker.pipe.close()
            os.close(worker.stacks)
        self._selector.close()
