"""How this process was started: by duoka itself, as one of a group, by an engine, or alone.

And so its rank, and its connections to the others: a store, and on one machine shared memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from torch import distributed
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from duoka import engines
from duoka.collectives import shared_memory
from duoka.collectives.base import Exchange
from duoka.collectives.connecting import gather_texts
from duoka.collectives.direct import between
from duoka.collectives.process import MultiHostCollectives, ProcessCollectives
from duoka.collectives.shared_memory import SharedMemoryExchange
from duoka.engines import Task
from duoka.errors import MISSING, OptionError, TimedOut
from duoka.network import rendezvous
from duoka.network.keys import Key
from duoka.planning.plan import Plan
from duoka.private.torch import store_of_default_group
from duoka.supervision.status_board import SLOT_SIZE, StatusBoard, StatusSlot
from duoka.system import environment
from duoka.system.environment import RankInfo
from duoka.system.processes import SHARED_MEMORY, machine_name


@dataclass(frozen=True, slots=True)
class Communication:
    """The connections of one rank to the others, used by all runs of its process."""

    store: Store
    slot: StatusSlot  # records its collectives
    exchange: Exchange | None  # communication for small tensors; None: gloo only
    here: int  # number of ranks on this machine
    far: bool = False  # no status board shows all ranks
    key: Key = field(default_factory=Key)  # of the run

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
    if here == world_size:  # all ranks come to the same answer, and so all or none call `_memory`
        environment.set_gloo_device()
        memory = _memory(store, rank, world_size, timeout) if shared_memory.is_possible() else None
    if memory is None:
        return Communication(store, StatusBoard.create(1, rank).slot(rank), None, here, far=True)
    board_memory, exchange_memory = memory
    slot = StatusBoard(board_memory, range(world_size)).slot(rank)
    return Communication(store, slot, SharedMemoryExchange(exchange_memory, rank, world_size, timeout), here)


def _memory(store: Store, rank: int, world_size: int, timeout: float) -> tuple[mmap.mmap, mmap.mmap] | None:
    """Map one file in shared memory in all ranks; None if that is not possible.

    Rank 0 creates it and publishes its name, empty if there is no room. It removes the name when all have opened the
    file, so the memory is freed with the processes.
    """
    # Rounded up: the second mapping must begin at a multiple of the granularity.
    board = -(-world_size * SLOT_SIZE // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    size = board + shared_memory.memory_size(world_size)
    with ExitStack() as until_opened:
        if rank == 0:
            path = ""
            with suppress(OSError):
                made = until_opened.enter_context(tempfile.NamedTemporaryFile(prefix="duoka-", dir=SHARED_MEMORY))
                made.truncate(size)
                path = made.name
            store.set("memory", path)
        file = -1
        with suppress(OSError):
            file = os.open(store.get("memory").decode(), os.O_RDWR)
            until_opened.callback(os.close, file)
        # Rank 0's `with` ends after this: the file keeps its name until all have opened it.
        if gather_texts(store, "memory of {}", rank, world_size, str(file >= 0), timeout) != ["True"] * world_size:
            return None
        return mmap.mmap(file, board), mmap.mmap(file, size - board, offset=board)


@dataclass(frozen=True)
class Origin(ABC):
    """One rank among `world_size`."""

    rank: int
    world_size: int
    local_rank: int  # its number on its machine

    @property
    def device(self) -> str | None:
        """The device assigned to this process, as torch names it; None: the process chooses."""
        return None

    @property
    def machine(self) -> str:
        """A name of this rank's machine, equal for all ranks on it and for no others."""
        return machine_name()

    @abstractmethod
    def store(self, timeout: float) -> Store:
        """Return the store in which ranks find each other; wait up to `timeout` seconds. Called once."""

    def connect(self, timeout: float) -> Communication:
        """Connect to the other ranks (at least one); wait up to `timeout` seconds. Called once."""
        return connect(self.store(timeout), self.rank, self.world_size, timeout)


@dataclass(frozen=True)
class Grouped(Origin):
    """One rank of torch's default group, initialized by Ray Train or by the script; duoka shares its store."""

    def store(self, timeout: float) -> Store:
        return PrefixStore("duoka", store_of_default_group())  # the group's own keys are beside it


@dataclass(frozen=True)
class Started(Origin):
    """One of the processes that an engine (torchrun, mpirun, srun, ...) has started."""

    task: Task  # as the engine says

    def store(self, timeout: float) -> Store:
        task = self.task
        if not task.host or not task.port:
            hint = f"{task.engine} does not set them; for example: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500"
            raise OptionError("MASTER_ADDR and MASTER_PORT", MISSING, f"set for {task.count} ranks", hint)
        # Where the engine has a store at that address (torchrun's agent), rank 0 must not open another.
        store = reach_tcp_store(task.rank, task.host, task.port, timeout, is_master=task.rank == 0 and not task.store)
        # A prefix for each attempt: the engine's own store keeps the addresses of dead ranks.
        return PrefixStore(f"duoka/attempt{task.attempt}", store)


@dataclass(frozen=True)
class SingleProcess(Origin):
    """A process started as the only one: `python train.py`, a notebook, a test."""

    def store(self, timeout: float) -> Store:
        return HashStore()


@dataclass(frozen=True)
class Forked(Origin):
    """A worker of `duoka run` or `duoka.launch`."""

    plan: Plan  # its settings are the defaults of `duoka.start`
    info: RankInfo
    slot: StatusSlot  # records its collectives
    shared_memory: mmap.mmap | None  # with all other ranks
    device_name: str  # the device, as torch names it in this process
    key: Key = field(default_factory=Key)  # of the run
    seed: int | None = None  # for all generators, in a trial; None: that of `duoka.start`

    @property
    def device(self) -> str:
        return self.device_name

    @property
    def machine(self) -> str:
        return str(self.info.machine)

    def store(self, timeout: float) -> Store:
        return rendezvous.reach_store(self.info, timeout)

    def connect(self, timeout: float) -> Communication:
        rank, size, store = self.rank, self.world_size, self.store(timeout)
        exchange: Exchange | None = None
        several = self.plan.machines.count > 1  # then no status board shows all ranks
        if several:
            exchange = between(store, rank, size, timeout, self.key)
        elif self.shared_memory is not None:
            exchange = SharedMemoryExchange(self.shared_memory, rank, size, timeout)
        return Communication(store, self.slot, exchange, self.info.local_world_size, several, self.key)


def find_origin() -> Origin:
    """Return the origin of this process, from its environment.

    Raises OptionError if environment variables contradict each other.
    """
    task = engines.find()
    if distributed.is_initialized():
        rank, size = distributed.get_rank(), distributed.get_world_size()
        if task is None or (task.rank, task.count) != (rank, size):  # the variables are of something else
            return Grouped(rank, size, 0)
        return Grouped(rank, size, task.local_rank or 0)
    return SingleProcess(0, 1, 0) if task is None else Started(task.rank, task.count, task.local_rank or 0, task)


def reach_tcp_store(rank: int, address: str, port: int, timeout: float, is_master: bool) -> Store:
    """Return a store at an address that all ranks were given.

    Raises TimedOut if no store answers there, OptionError if the port is in use.
    """
    limit = timedelta(seconds=timeout)
    try:
        # Without waiting for workers: those that never come are named by `connect`, and not by torch's timeout.
        return rendezvous.tcp_store(
            address, port, is_master=is_master, timeout=limit, wait_for_workers=False, use_libuv=True
        )
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if is_master:
            raise OptionError("MASTER_PORT", port, "a free port", text) from None
        raise TimedOut(f"rank {rank} gave up waiting for rank 0 at {address}:{port}, {timeout:g} s: {text}") from None
