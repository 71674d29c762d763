"""What every way of starting a process answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from duoka.errors import OptionError, TimedOut
from duoka.network import rendezvous
from duoka.origins.communication import Communication, meet


@dataclass(frozen=True)
class Origin(ABC):
    """One rank among `world_size`. local_rank: its number on its own machine."""

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
        """What the surroundings tell; None where the process was not started in this way."""

    @property
    def device(self) -> str | None:
        """The device that it was given, as torch calls it; None where the process chooses."""
        return None

    @abstractmethod
    def store(self, timeout: float) -> Store:
        """Where the ranks find each other. Every process asks once; it waits at most `timeout` seconds."""

    def meet(self, timeout: float) -> Communication:
        """Meet the other ranks. Called where there are several, once in a process."""
        return meet(self.store(timeout), self.rank, self.world_size, timeout)


def tcp_store(rank: int, address: str, port: int, timeout: float, is_master: bool) -> Store:
    """A store at a place that all ranks were told.

    Raises:
        TimedOut: nobody answers there.
        OptionError: the port is taken.
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
        raise TimedOut(f"rank {rank} found nobody at {address}:{port} in {timeout:g} s: {text}") from None
