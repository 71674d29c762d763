"""The base class of all ways to start a process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from duoka.errors import OptionError, TimedOut
from duoka.network import rendezvous
from duoka.origins.communication import Communication, connect
from duoka.system.machine import machine_name


@dataclass(frozen=True)
class Origin(ABC):
    """One rank among `world_size`. local_rank: its number on its machine."""

    rank: int
    world_size: int
    local_rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            hint = f"{self.world_size} processes were started"
            raise OptionError("the rank", self.rank, f"from 0 to {self.world_size - 1}", hint)

    @classmethod
    @abstractmethod
    def found(cls) -> Origin | None:
        """Return the origin, read from the environment; None if the process was not started in this way."""

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


def reach_tcp_store(rank: int, address: str, port: int, timeout: float, is_master: bool) -> Store:
    """Return a store at an address that all ranks were given.

    Raises:
        TimedOut: no store answers there.
        OptionError: the port is in use.
    """
    try:
        return rendezvous.tcp_store(
            address,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            use_libuv=True,
        )
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if is_master:
            raise OptionError("MASTER_PORT", port, "a free port", text) from None
        raise TimedOut(f"rank {rank} gave up waiting for rank 0 at {address}:{port}, {timeout:g} s: {text}") from None
