"""The connections between the ranks of a run: a store, and on one machine shared memory."""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from duoka.collectives import shared_memory
from duoka.collectives.base import Exchange
from duoka.collectives.connecting import gather_texts
from duoka.collectives.multi_host import MultiHostCollectives
from duoka.collectives.process import ProcessCollectives
from duoka.collectives.shared_memory import SharedMemoryExchange
from duoka.network.keys import Key
from duoka.supervision.status_board import SLOT_SIZE, StatusBoard, StatusSlot
from duoka.system import environment
from duoka.system.machine import SHARED_MEMORY, machine_name


@dataclass(frozen=True, slots=True)
class Communication:
    """The connections of one rank to the others, used by all runs of its process.

    slot: records its collectives. exchange: communication for small tensors; None: gloo only.
    here: number of ranks on this machine. far: no status board shows all ranks.
    key: of the run.
    """

    store: Store
    slot: StatusSlot
    exchange: Exchange | None
    here: int
    far: bool = False
    key: Key = field(default_factory=Key)

    def collectives(self, rank: int, world_size: int, timeout: float, run: int) -> ProcessCollectives:
        """Create the collectives of this process's run number `run`. timeout: seconds."""
        store = PrefixStore(f"run{run}", self.store)
        make = MultiHostCollectives if self.far else ProcessCollectives
        made = make(store, rank, world_size, timedelta(seconds=timeout), self.slot, self.exchange)
        made.key = self.key
        return made


def connect(store: Store, rank: int, world_size: int, timeout: float) -> Communication:
    """Connect to the other ranks through a store; map shared memory if all ranks are on one machine.

    Raises TimedOut if a rank did not connect.
    """
    machines = gather_texts(store, "machine of {}", rank, world_size, machine_name(), timeout)
    here = machines.count(machines[rank])
    memory = None
    if here == world_size:
        environment.set_gloo_device()
    if here == world_size and shared_memory.is_possible():
        memory = _memory(store, rank, world_size, timeout)
    if memory is None:
        return Communication(store, StatusBoard.create(1, rank).slot(rank), None, here, far=True)
    board_memory, exchange_memory = memory
    slot = StatusBoard(board_memory, range(world_size)).slot(rank)
    return Communication(store, slot, SharedMemoryExchange(exchange_memory, rank, world_size, timeout), here)


def _memory(store: Store, rank: int, world_size: int, timeout: float) -> tuple[mmap.mmap, mmap.mmap] | None:
    """Map one file in shared memory in all ranks; None if that is not possible.

    Rank 0 creates it and publishes its name; it removes the name when all have opened it, so the memory is freed with
    the processes.
    """
    board = -(-world_size * SLOT_SIZE // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    size = board + shared_memory.memory_size(world_size)
    if rank == 0:
        store.set("memory", _make(size))
    name = store.get("memory").decode()
    file = -1
    with suppress(OSError):
        file = os.open(name, os.O_RDWR) if name else -1
    try:
        opened = gather_texts(store, "memory of {}", rank, world_size, str(file >= 0), timeout)
        if opened != ["True"] * world_size:
            return None
        return mmap.mmap(file, board), mmap.mmap(file, size - board, offset=board)
    finally:
        if rank == 0 and name:
            os.unlink(name)
        if file >= 0:
            os.close(file)


def _make(size: int) -> str:
    """Create a file of this size in shared memory; return its name, empty if there is no room."""
    try:
        file, name = tempfile.mkstemp(prefix=f"duoka-{secrets.token_hex(4)}-", dir=SHARED_MEMORY)
    except OSError:
        return ""
    try:
        os.truncate(file, size)
    except OSError:
        os.unlink(name)
        return ""
    finally:
        os.close(file)
    return name
