"""A process forked by duoka, which sets its rank and connections."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

from torch.distributed import Store  # type: ignore[attr-defined]

from duoka.environment import RankInfo
from duoka.network.keys import Key
from duoka.network.rendezvous import reach_store
from duoka.options import BatchNorm, Loading, Randomness
from duoka.origins.base import Origin
from duoka.origins.communication import Communication
from duoka.view.collectives.base import CollectiveSlot, Exchange
from duoka.view.collectives.direct import between
from duoka.view.collectives.shared_memory import SharedMemoryExchange


@dataclass(frozen=True)
class Forked(Origin):
    """A worker of `duoka run` or `duoka.launch`.

    info: of this worker. slot: records its collectives. exchange: memory shared with all other ranks, or None.
    given: the device, as torch names it in this process. defaults: options of the command. key: of the run.
    far: the ranks belong to several commands, so no status board shows all of them.
    """

    info: RankInfo
    slot: CollectiveSlot
    exchange: mmap.mmap | None
    given: str
    defaults: StartDefaults
    key: Key = field(default_factory=Key)
    far: bool = False

    @classmethod
    def found(cls) -> None:
        return None

    @property
    def device(self) -> str:
        return self.given

    @property
    def machine(self) -> str:
        return str(self.info.machine)

    def store(self, timeout: float) -> Store:
        return reach_store(self.info, timeout)

    def connect(self, timeout: float) -> Communication:
        rank, size, store = self.rank, self.world_size, self.store(timeout)
        way: Exchange | None = None
        if self.far:
            way = between(store, rank, size, timeout, self.key)
        elif self.exchange is not None:
            way = SharedMemoryExchange(self.exchange, rank, size, timeout)
        return Communication(store, self.slot, way, self.info.local_world_size, self.far, self.key)


@dataclass(frozen=True, slots=True)
class StartDefaults:
    """Options of `duoka run`, used by `duoka.start` as defaults.

    seed: for all generators; None: that of `duoka.start`.
    """

    batch_norm: BatchNorm
    randomness: Randomness
    loading: Loading
    timeout: float
    seed: int | None = None
    strategy: str = "auto"
    shares: int = 0
    row_independent: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    measures_rows: bool = False
