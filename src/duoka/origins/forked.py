"""A process forked by duoka, which sets its rank and connections."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

from torch.distributed import Store  # type: ignore[attr-defined]

from duoka.collectives.base import Exchange
from duoka.collectives.direct import between
from duoka.collectives.shared_memory import SharedMemoryExchange
from duoka.network.keys import Key
from duoka.network.rendezvous import reach_store
from duoka.origins.communication import Communication
from duoka.origins.origin import Origin
from duoka.planning.plan import Plan
from duoka.supervision.status_board import StatusSlot
from duoka.system.environment import RankInfo


@dataclass(frozen=True)
class Forked(Origin):
    """A worker of `duoka run` or `duoka.launch`.

    plan: its settings are the defaults of `duoka.start`. info: of this worker. slot: records its collectives.
    exchange: memory shared with all other ranks, or None. device_name: the device, as torch names it in this process.
    key: of the run. seed: for all generators, in a trial; None: that of `duoka.start`.
    """

    plan: Plan
    info: RankInfo
    slot: StatusSlot
    exchange: mmap.mmap | None
    device_name: str
    key: Key = field(default_factory=Key)
    seed: int | None = None

    @property
    def device(self) -> str:
        return self.device_name

    @property
    def machine(self) -> str:
        return str(self.info.machine)

    def store(self, timeout: float) -> Store:
        return reach_store(self.info, timeout)

    def connect(self, timeout: float) -> Communication:
        rank, size, store = self.rank, self.world_size, self.store(timeout)
        exchange: Exchange | None = None
        several = self.plan.machines.count > 1  # then no status board shows all ranks
        if several:
            exchange = between(store, rank, size, timeout, self.key)
        elif self.exchange is not None:
            exchange = SharedMemoryExchange(self.exchange, rank, size, timeout)
        return Communication(store, self.slot, exchange, self.info.local_world_size, several, self.key)
