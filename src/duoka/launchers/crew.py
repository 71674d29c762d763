"""The workers of one attempt, as the command process sees them."""

from __future__ import annotations

import json
import mmap
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from duoka.ending import Ending
from duoka.errors import WorkerFailed
from duoka.launchers.birth import fork, redirect
from duoka.launchers.output import Outputs
from duoka.launchers.processes import session_members
from duoka.launchers.signals import Signals
from duoka.plan import Plan
from duoka.worker import STACKS_SIGNAL, Attempt, Post, live

STEP = 0.05  # seconds between two looks at what does not announce itself
TO_TERMINATE = 3.0  # seconds between SIGTERM and SIGKILL
TO_DIE = 2.0  # seconds that the kernel may take after SIGKILL


@dataclass(slots=True)
class Worker:
    """One worker. `status` is its exit code, or minus the signal that ended it; None while it lives.

    own_log: its output goes to a file of its own.
    afterwards: what was raised when its script had ended well, by functions that run at exit.
    gone_at: CLOCK_MONOTONIC when its end was seen. told_at: when it was sent a signal before that; None: it was not.
    """

    rank: int
    pid: int
    wire: socket.socket
    stacks: int
    own_log: bool
    ending: Ending | None = None
    status: int | None = None
    afterwards: str = ""
    gone_at: float = 0.0
    told_at: float | None = None
    heard: bytearray = field(default_factory=bytearray)

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        return self.status is None

    @property
    def done(self) -> bool:
        """Whether its script has ended, or its process has without a word."""
        return self.ending is not None or not self.alive

    @property
    def left(self) -> bool:
        """Whether its script ended well, which it should not have while others went on."""
        return self.ending.code == 0 if self.ending is not None else self.status == 0

    @property
    def told_to_end(self) -> bool:
        """Whether it had to be."""
        return self.told_at is not None

    @property
    def failed(self) -> bool:
        """Whether it ended badly, and not because it was told to: a script may answer that, as by saving."""
        if self.ending is not None and self.ending.code != 0:
            return self.told_at is None or self.ending.time < self.told_at
        return self.status not in (None, 0) and not self.told_to_end

    def tell_to_end(self, number: int) -> None:
        """Send a signal to it, if it lives, and to what it started."""
        if self.alive and self.told_at is None:
            self.told_at = time.monotonic()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Others:
    """The commands of other machines, to which a crew listens, too. Here: there are none."""

    files: tuple[int, ...] = ()

    def read(self) -> None:
        """Take in what they have said, when one of `files` can be read."""

    def let_go(self) -> None:
        """Close what leads to them, in a worker."""


class Crew:
    """The workers of one attempt: forked together, listened to, ended together."""

    def __init__(self, signals: Signals, others: Others | None = None) -> None:
        self.signals, self._others = signals, others or Others()
        self.workers: list[Worker] = []
        self._passed_on = len(signals.for_scripts)
        self._exchange: mmap.mmap | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.fd, selectors.EVENT_READ)
        for file in self._others.files:
            self._selector.register(file, selectors.EVENT_READ, self._others)

    def start(self, plan: Plan, attempt: Attempt, outputs: Outputs) -> None:
        """Fork the workers. Each waits at its wire until `go`.

        Raises:
            WorkerFailed: the system lets no more of them be started.
        """
        self._exchange = attempt.exchange
        try:
            for rank in plan.ranks:
                own_log = outputs.file(rank) is not None
                self._fork(plan, Post(rank, attempt, own_log), outputs)
        except OSError as error:
            count, size = len(self.workers), plan.workers
            raise WorkerFailed(f"only {count} of {size} workers could be started: {error.strerror}") from None

    def _fork(self, plan: Plan, post: Post, outputs: Outputs) -> None:
        ours, theirs = socket.socketpair()
        stacks = os.memfd_create(f"duoka-stacks-{post.rank}")

        def life() -> int:
            ours.close()
            self._let_go()
            self._others.let_go()
            redirect(outputs.file(post.rank), stdin=post.rank == 0)
            outputs.close()
            return live(plan, post, theirs, stacks)

        worker = Worker(post.rank, fork(life, self.signals), ours, stacks, post.own_log)
        theirs.close()
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self.workers.append(worker)

    def go(self, port: int) -> None:
        """Tell the workers where the store is."""
        for worker in self.workers:
            with suppress(OSError):  # it died already, which is noticed elsewhere
                worker.wire.send(b"%d\n" % port)

    # What happens.

    def listen(self, seconds: float) -> None:
        """Wait until something happens, for at most `seconds`, and take in what it was."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                self.signals.read()
                self._pass_on()
            elif key.data is self._others:
                self._others.read()
            else:
                self._hear(key.data)
        for worker in self.workers:
            if worker.alive:
                self._look_at(worker)
        if self.failed():
            self._let_nobody_wait()

    def _pass_on(self) -> None:
        """Give the scripts the signals that are theirs to answer; what they do not take in ends them, as ever."""
        for number in self.signals.for_scripts[self._passed_on :]:
            self.signal(number)
        self._passed_on = len(self.signals.for_scripts)

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Listen until `until()`, for at most `seconds`; whether it came to be."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.listen(min(left, STEP))
        return True

    def gone(self) -> bool:
        """Whether no worker lives."""
        return not any(worker.alive for worker in self.workers)

    def done(self) -> bool:
        """Whether all scripts have ended."""
        return all(worker.done for worker in self.workers)

    def failed(self) -> bool:
        """Whether a worker ended badly."""
        return any(worker.failed for worker in self.workers)

    def _let_nobody_wait(self) -> None:
        """What ranks notice of a lost one over the network by themselves, they are told where they share memory."""
        if self._exchange is not None:
            from duoka.view.nearby import give_up

            give_up(self._exchange)

    def _hear(self, worker: Worker) -> None:
        try:
            said = worker.wire.recv(1 << 16)
        except OSError:
            said = b""
        worker.heard += said
        if not said:
            self._selector.unregister(worker.wire)
        first, *more = bytes(worker.heard).splitlines(keepends=True) or [b""]
        if first.endswith(b"\n") and worker.ending is None:
            worker.ending = Ending.of(first)
        if more and more[0].endswith(b"\n"):
            worker.afterwards = json.loads(more[0])

    def _look_at(self, worker: Worker) -> None:
        """See whether a worker is gone. It is reaped at the very end: until then no other gets its number."""
        seen = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return
        while worker.wire in self._selector.get_map():
            self._hear(worker)  # its last word may have come together with its end
        worker.status = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
        worker.gone_at = time.monotonic()

    # Their end.

    def signal(self, number: int) -> None:
        """Pass a signal on to the workers; Ctrl-C to all that they started, too, as a terminal does."""
        for worker in self.workers:
            if worker.alive:
                (os.killpg if number == signal.SIGINT else os.kill)(worker.pid, number)

    def wake(self) -> None:
        """Interrupt what the workers wait in: the kernel may have given a signal to a thread that python never asks.

        The main thread, which answers it, would find it when it has slept enough.
        """
        for worker in self.workers:
            if worker.alive:
                os.kill(worker.pid, STACKS_SIGNAL)

    def end(self) -> None:
        """End what is left of the workers and of what they started: politely, then by force; in 5 s at most.

        Those whose script has ended use the time to leave by themselves. Ctrl-C hurries it.
        """
        hurried = self.signals.interrupts
        self._let_nobody_wait()
        if not self._nothing_left():
            for worker in self.workers:
                if not (worker.alive and worker.done):
                    worker.tell_to_end(signal.SIGTERM)
                    worker.tell_to_end(signal.SIGCONT)  # a stopped process takes it when it goes on
            self.wait(lambda: self._nothing_left() or self.signals.interrupts > hurried, TO_TERMINATE)
        self.kill()

    def kill(self) -> None:
        """End what is left of the workers and of what they started, at once."""
        for worker in self.workers:
            worker.tell_to_end(signal.SIGKILL)
        for pid in session_members(self._pids()):  # they made process groups of their own
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.wait(self.gone, TO_DIE)

    def _nothing_left(self) -> bool:
        return self.gone() and not session_members(self._pids())

    def _pids(self) -> Iterable[int]:
        return [worker.pid for worker in self.workers]

    def close(self) -> None:
        """Reap the workers, and let go of all that was held for them."""
        if not self.gone():  # something unforeseen came between
            self.kill()
        for worker in self.workers:
            if not worker.alive:
                os.waitpid(worker.pid, 0)
        self._let_go()

    def _let_go(self) -> None:
        for worker in self.workers:
            worker.wire.close()
            os.close(worker.stacks)
        self._selector.close()
