"""Ranks that play one program after another: processes forked once, each program with a session of its own."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch._dynamo  # functions of torch import it at their first call: once here, not in each rank after a fork
import torch.fx.experimental.symbolic_shapes
from torch.distributed import FileStore  # type: ignore[attr-defined]

from duoka import plain
from duoka.collectives.process import ProcessCollectives
from duoka.collectives.shared_memory import SharedMemoryExchange, memory_size
from duoka.hardware.gpu import Device
from duoka.plain import session
from duoka.plain.patching import Patches
from duoka.plain.shared_random import SharedRandom
from duoka.planning.options import Options
from duoka.planning.plan import Kind, Plan
from duoka.script import Target
from duoka.supervision.status_board import StatusBoard
from duoka.system.environment import set_gloo_device
from tests.fuzz.program import DEVICE, FILE, Played, Program, nudge, play

PATIENCE = 60.0  # seconds without an answer after which ranks are taken to wait for each other
COLLECTIVE = 15.0  # seconds that a collective waits for other ranks
GRACE = 3.0  # seconds in which other ranks are to answer after one has raised
ENDED = "Ended"  # in place of an error: the rank was ended because another has raised
DIED = Played((), ("Died", "the process has ended"))
HAS_ENDED, HANGS = (Played((), (how, "no answer")) for how in (ENDED, "Hangs"))
PROGRAMS = 400  # of one set of processes
PR_SET_PDEATHSIG = 1
WEIGHTS = (1.0, 5.0, 2.0)  # of uneven shares
SHARES = 4  # of exact; batches of fewer rows are not split


class Ranks:
    """Processes that play programs as the ranks of a run.

    strategy: ddp, exact, fsdp or offload (fsdp with --cpu-offload); python: one process without duoka. rows: whether
    their shares of a batch are uneven.
    """

    def __init__(self, world_size: int, strategy: str, rows: bool = False) -> None:
        self.world_size, self.strategy = world_size, strategy
        self.weights = WEIGHTS[:world_size] if rows else ()
        self._pids: list[int] = []
        self._ends: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._played = 0

    def play(self, program: Any) -> list[Played]:
        """Return what each rank has printed. The processes are ended if one does not answer, or gave an error."""
        if not self._pids or self._played >= PROGRAMS:
            self.close()
            self._start()
        self._played += 1
        results: dict[int, Played] = {}
        for end in self._ends:
            end.send(program)
        while len(results) < self.world_size:
            waiting = {end: rank for rank, end in enumerate(self._ends) if rank not in results}
            ready = wait(list(waiting), _patience(results))
            for end in ready:
                try:
                    results[waiting[end]] = end.recv()  # type: ignore[index]
                except EOFError:
                    results[waiting[end]] = DIED  # type: ignore[index]
            if not ready:  # as `duoka run`, which ends the other ranks when one has raised
                how = HAS_ENDED if any(one.error for one in results.values()) else HANGS
                results |= dict.fromkeys(waiting.values(), how)
        played = [results[rank] for rank in range(self.world_size)]
        if any(one.error and one not in (DIED, HAS_ENDED) for one in played):  # NCCL ends the process that waits
            played = [HAS_ENDED if one == DIED else one for one in played]
        if any(one.error for one in played):
            self.close()
        return played

    def _start(self) -> None:
        memory, board = mmap.mmap(-1, memory_size(self.world_size)), StatusBoard.create(self.world_size)
        self._folder = tempfile.TemporaryDirectory(prefix="duoka-fuzz-")
        store, parent = os.path.join(self._folder.name, "store"), os.getpid()
        pipes = [Pipe() for _ in range(self.world_size)]
        for rank in range(self.world_size):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of threads: pytest's own are no matter
                pid = os.fork()
            if pid == 0:
                try:
                    for place, (ours, theirs) in enumerate(pipes):
                        ours.close()
                        if place != rank:
                            theirs.close()
                    self._serve(rank, parent, store, memory, board, pipes[rank][1])
                finally:
                    os._exit(0)
            self._pids.append(pid)
        for ours, theirs in pipes:
            theirs.close()
            self._ends.append(ours)
        self._played = 0

    def _serve(
        self, rank: int, parent: int, store: str, memory: mmap.mmap, board: StatusBoard, end: Connection
    ) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_WRONLY)
        if "FUZZ_SHOWN" not in os.environ:
            os.dup2(null, 1)
            os.dup2(null, 2)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        if DEVICE == "cpu":  # to seed devices that are not there costs torch a traceback of each call
            torch.cuda.random._lazy_call = torch.mtia._lazy_call = lambda *args, **kwargs: None
        if self.strategy == "python":
            self._answer(end, False, lambda request: play_alone(*request))
            return
        os.environ["NCCL_HOSTID"] = str(os.getpid())  # NCCL takes two ranks on one GPU if they are of two hosts
        set_gloo_device()
        place, size = FileStore(store, self.world_size), self.world_size
        exchange = SharedMemoryExchange(memory, rank, size, COLLECTIVE)
        ranks = _Collectives(place, rank, size, timedelta(seconds=COLLECTIVE), board.slot(rank), exchange)
        shared_random = SharedRandom(1234, lambda holder=None: place)
        plan = replace(plan_of(self.strategy, size), weights=self.weights)
        self._answer(end, rank > 0, partial(in_session, plan, ranks, shared_random))

    def _answer(self, end: Connection, collecting: bool, play_one: Callable[[Any], Played]) -> None:
        """Play each program that is sent. collecting: whether garbage is collected, at times, meanwhile."""
        gc.freeze()
        gc.set_threshold(40, 3, 3)
        while True:
            try:
                program = end.recv()
            except EOFError:
                return
            gc.collect()
            (gc.enable if collecting else gc.disable)()
            end.send(play_one(program))

    def close(self) -> None:
        """End the processes."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids:
            os.waitpid(pid, 0)
        for end in self._ends:
            end.close()
        self._pids, self._ends = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _patience(results: dict[int, Played]) -> float:
    """Return the seconds in which another rank is to answer."""
    if any(one.error for one in results.values()):
        return GRACE
    return COLLECTIVE + 15 if results else PATIENCE


class _Collectives(ProcessCollectives):
    """The collectives of one program after another."""

    def barrier_at_end(self) -> None:
        self.barrier()


def play_alone(program: Program, seed: int | None = None) -> Played:
    """Play a program without duoka. seed: of the moves of its numbers by a unit in the last place; None: as it is."""
    return play(program) if seed is None else play(program, nudge(seed))


def plan_of(strategy: str, world_size: int) -> Plan:
    """Return the plan of `duoka run --devices cpu:N --strategy ...`."""
    options = Options(Target(FILE))
    return Plan(
        target=options.target,
        kind=Kind.PLAIN,
        kind_reason="",
        kind_can_be_either=False,
        devices=tuple(Device(DEVICE, index) for index in range(world_size)),
        strategy="fsdp" if strategy == "offload" else strategy,
        batch_norm=options.batch_norm,
        randomness=options.randomness,
        loading=options.loading,
        threads=1,
        timeout=COLLECTIVE,
        step_timeout=None,
        log_dir=None,
        verbosity="quiet",
        shares=SHARES if strategy == "exact" else 0,
        cpu_offload=strategy == "offload",
    )


def in_session(plan: Plan, ranks: Any, shared_random: SharedRandom, program: Any) -> Played:
    """Play a program as `duoka run` runs a script; all functions of torch and Python are put back afterwards."""
    sessions: list[Patches] = []

    class Kept(Patches):
        def __init__(self) -> None:
            super().__init__()
            sessions.append(self)

    ours, session.Patches = session.Patches, Kept  # type: ignore[misc]
    played = Played((), ("NotPlayed", ""))

    def script() -> None:
        nonlocal played
        played = play(program)
        if played.error is not None:
            raise RuntimeError  # ends the session without a barrier

    try:
        plain.run_plain(plan, ranks, shared_random, lambda line: None, script)
    except BaseException as error:
        if played.error is None:
            text = f"{error}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"
            played = Played(played.events, (f"{type(error).__name__} at the end", text))
    finally:
        session.Patches = ours  # type: ignore[misc]
        for patches in sessions:
            patches.undo()
    return played
