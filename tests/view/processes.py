"""Ranks as processes, forked from the test: real communication, and quick enough for every test."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from duoka.collectives.process import ProcessCollectives
from duoka.collectives.shared_memory import SharedMemoryExchange, memory_size
from duoka.supervision.status_board import StatusBoard
from duoka.system.environment import set_gloo_device

GONE = "gone"
PATIENCE = 60  # seconds after which a rank is ended, whatever it waits for


@dataclass(frozen=True)
class Raised:
    """What a rank raised instead of giving a result."""

    kind: str
    text: str


def forked(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` gives in each of `world_size` processes; GONE where one ended without a word."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world_size):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of threads: pytest's own are no matter
                pid = os.fork()
            if pid == 0:
                _live(work, rank, os.path.join(folder, str(rank)))
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        return [_read(os.path.join(folder, str(rank))) for rank in range(world_size)]


def _live(work: Callable[[int], Any], rank: int, file: str) -> None:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE)
        torch.set_num_threads(1)
        try:
            found = work(rank)
        except BaseException as error:  # pytest's own, too
            found = Raised(type(error).__name__, str(error))
        with open(file, "wb") as out:
            pickle.dump(found, out)
    finally:
        os._exit(0)


def _read(file: str) -> Any:
    with suppress(FileNotFoundError), open(file, "rb") as found:
        return pickle.load(found)
    return GONE


def in_processes(
    world_size: int, work: Callable[[ProcessCollectives], Any], *, nearby: bool, timeout: float = 20.0
) -> list[Any]:
    """What `work` gives on each rank of a group of processes.

    nearby: whether they have memory in common, or gloo only. timeout: seconds that a collective may wait.
    """
    memory = mmap.mmap(-1, memory_size(world_size))
    board = StatusBoard.create(world_size)
    with tempfile.TemporaryDirectory() as folder:
        place = os.path.join(folder, "store")

        def on_rank(rank: int) -> Any:
            set_gloo_device()
            limit = timedelta(seconds=timeout)
            store = FileStore(place, world_size)
            end = SharedMemoryExchange(memory, rank, world_size, timeout) if nearby else None
            return work(ProcessCollectives(store, rank, world_size, limit, board.slot(rank), end))

        return forked(world_size, on_rank)


def all_well(found: list[Any]) -> list[Any]:
    """The results, if no rank raised or died."""
    assert not [one for one in found if one == GONE or isinstance(one, Raised)], found
    return found
